"""torch.export supports whole models for one shape, and decoding steps for any shape, with the same outputs."""

import io

import pytest
import torch
from torch import nn

from mega_fairseq.models.export import export_start, export_step
from tests.helpers.golden_checks import each
from tests.helpers.golden_models import inputs
from tests.helpers.golden_models import model as golden_model
from tests.helpers.released import READS_SAFELY
from tests.helpers.small_models import TYPES, language_model, translation_model

pytestmark = pytest.mark.slow


class Logits(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, src_tokens, prev_output_tokens):
        return self.model(src_tokens, None, prev_output_tokens)[0]


@each("translation model", where=lambda case: "chunk" in case.name)
@torch.no_grad()
def test_an_exported_translation_model_gives_its_logits(case):
    model, given = Logits(golden_model(case)), inputs(case)
    arguments = given["src_tokens"], given["prev_output_tokens"]
    exported = torch.export.export(model, arguments, strict=True).module()
    torch.testing.assert_close(exported(*arguments), model(*arguments), atol=1e-5, rtol=1e-5)


def loaded(exported):
    """The exported program after saving and loading."""
    file = io.BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    return torch.export.load(file).module()


AFT = {"decoder_chunk_size": -1, "token_mixer": "aft", "decoder_aft_form": "local"}
NEW_TORCH = pytest.mark.skipif(not READS_SAFELY, reason="needs torch 2.6")


@NEW_TORCH
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (translation_model, {"rel_pos_bias": "rotary", "encoder_chunk_size": 4, "attention_activation_fn": "laplace"}),
        (language_model, {"decoder_chunk_size": -1, "truncation_length": 3, "adaptive_softmax_cutoff": "10,20"}),
        (language_model, {**AFT, "decoder_aft_reach": 3}),
        (language_model, {"decoder_chunk_size": -1, "token_mixer": "megalodon"}),
        (language_model, {"decoder_chunk_size": -1, "token_mixer": "attention", "decoder_attention_heads": 2}),
    ],
)
@torch.no_grad()
def test_an_exported_step_gives_the_scores_of_the_model_for_any_batch(make, options):
    model, random = make(**options), torch.Generator().manual_seed(2)
    step = loaded(export_step(model))
    for batch, prefix, length, width in ((2, 3, 40, 9), (1, 1, 6, 1)):
        tokens, sources = (torch.randint(4, TYPES, (batch, size), generator=random) for size in (length, width))
        sources[:, 1 : 1 + batch // 2] = model.decoder.padding_idx
        source = (sources,) if make is translation_model else ()
        whole = model(*source, *([None] * len(source)), tokens)
        start = export_start(model, tokens[:, :prefix], *source).module()
        scores, state = start(tokens[:, :prefix], *source)
        found = [scores]
        for position in range(prefix, length):
            scores, state = step(tokens[:, position : position + 1], state)
            found.append(scores)
        torch.testing.assert_close(torch.cat(found, 1), model.get_normalized_probs(whole, True), atol=1e-5, rtol=1e-5)


@NEW_TORCH
@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"decoder_chunk_size": 5}, "--decoder-chunk-size is 5"),
        ({"decoder_chunk_size": -1, "token_mixer": "sparse", "decoder_attention_heads": 2}, "end of a block"),
    ],
)
def test_a_step_with_branches_is_refused(options, name):
    with pytest.raises(ValueError, match=name):
        export_step(language_model(**options))


@NEW_TORCH
def test_a_model_in_training_mode_is_refused():
    with pytest.raises(ValueError, match="training mode"):
        export_step(language_model(decoder_chunk_size=-1).train())
    with pytest.raises(ValueError, match="training mode"):
        export_start(language_model().train(), torch.tensor([[4, 5, 6]]))


def test_a_step_needs_torch_2_6(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.5.1")
    with pytest.raises(RuntimeError, match="torch 2.6"):
        export_step(language_model(decoder_chunk_size=-1))
