"""Quantised weights, and hooks on the projections and tables of a model, take effect in scores, losses and decoding."""

import pytest
import torch
from fairseq.modules.adaptive_softmax import TiedLinear
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from tests.helpers.small_models import (
    HEADS,
    TIED,
    TYPES,
    encoder,
    language_model,
    padded,
    sources,
    targets,
    texts,
    translation_model,
)

LANGUAGE = {"untied": {}, **HEADS, "adaptive, tied": TIED, "narrow input": {"decoder_input_dim": 8}}
PROJECTIONS = (nn.Linear, nn.Embedding, TiedLinear)


def inputs():
    return (padded(rows, False) for rows in texts(9, 9))


def log_probs(made, source):
    """Of all types, (B, L, V)."""
    return made.get_normalized_probs((made(source)[0], None), log_probs=True)


def of_targets(made, source, target):
    return made(source, target=target)[0].squeeze(-1)


def decoded(made, tokens, out=None):
    """The log-probabilities of all types after each token, in single steps with prepared weights."""
    if not made.decoder.steps.prepared:
        made.make_generation_fast_()
    state, steps = {}, []
    for end in range(1, tokens.size(1) + 1):
        scores, _ = made.decoder(tokens[:, :end], encoder_out=out, incremental_state=state)
        steps.append(made.get_normalized_probs((scores[:, -1:], None), log_probs=True))
    return torch.cat(steps, 1)


def quantise(made, kind):
    q = pytest.importorskip("torchao.quantization")
    int4 = q.IntxWeightOnlyConfig(torch.int4, q.PerAxis(0))
    configs = {"int8": q.Int8WeightOnlyConfig(), "int8, dynamic": q.Int8DynamicActivationInt8WeightConfig()}
    kinds = (nn.Embedding,) if kind == "int4 tables" else (nn.Linear,)
    q.quantize_(made, configs.get(kind, int4), lambda module, name: isinstance(module, kinds))
    return made


@pytest.mark.slow  # importing torchao
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, kind) for name in LANGUAGE for kind in ("int8", "int4 tables")),
        ("untied", "int8, dynamic"),
        ("untied", "int4"),
    ],
)
@torch.no_grad()
def test_a_language_model_with_weights_of_torchao_gives_the_same_scores_in_all_ways(name, kind):
    before, (source, target) = language_model(**LANGUAGE[name]), inputs()
    made = quantise(language_model(**LANGUAGE[name]), kind)
    scores = log_probs(made, source)
    assert 1e-4 < (scores - log_probs(before, source)).abs().max() < 3.0
    torch.testing.assert_close(of_targets(made, source, target), scores.gather(-1, target[..., None])[..., 0])
    torch.testing.assert_close(decoded(made, source), scores, atol=0.05, rtol=0.0)


@pytest.mark.slow  # importing torchao
@pytest.mark.parametrize("kind", ["int8", "int4 tables"])
@torch.no_grad()
def test_a_translation_model_with_weights_of_torchao_decodes_what_it_scores(kind):
    before, tokens = translation_model(), targets()
    made, scores = quantise(translation_model(), kind), []
    for model in (before, made):
        out = model.encoder(sources())
        scores.append(model.get_normalized_probs((model.decoder(tokens, encoder_out=out)[0], None), log_probs=True))
    assert 1e-4 < (scores[1] - scores[0]).abs().max() < 3.0
    torch.testing.assert_close(decoded(made, tokens, made.encoder(sources())), scores[1], atol=0.05, rtol=0.0)


@pytest.mark.parametrize("name", LANGUAGE)
@pytest.mark.parametrize("run", [of_targets, lambda made, source, _: decoded(made, source)], ids=["targets", "decoded"])
def test_hooks_on_projections_and_tables_of_a_language_model_fire(name, run):
    made, calls = language_model(**LANGUAGE[name]), set()
    for path, module in made.named_modules():
        if isinstance(module, PROJECTIONS):
            module.register_forward_hook(lambda module, args, y, path=path: calls.add(path))
    with torch.no_grad():
        run(made, *inputs())
    assert calls == {path for path, module in made.named_modules() if isinstance(module, PROJECTIONS)}


@pytest.mark.parametrize("name", LANGUAGE)
@torch.no_grad()
def test_a_hook_of_all_modules_sees_generation_also_with_weights_that_were_prepared_before(name):
    made, calls = language_model(**LANGUAGE[name]), set()
    tokens, _ = inputs()
    expected = decoded(made, tokens)
    handle = register_module_forward_hook(lambda module, args, y: calls.add(module))
    try:
        torch.testing.assert_close(decoded(made, tokens), expected)
    finally:
        handle.remove()
    of_blocks = {module for module in made.decoder.layers.modules() if isinstance(module, nn.Linear)}
    assert of_blocks <= calls


@torch.no_grad()
def test_a_hook_on_the_types_of_tokens_fires_where_all_are_of_the_first_type():
    made, calls = encoder(token_types=2), []
    made.encoder.embed_types.register_forward_hook(lambda *call: calls.append(call))
    made(torch.randint(4, TYPES, (2, 5)))
    assert calls
