"""`mega-fairseq convert` with language models: released outputs, and options that fairseq loads.

The checkpoints are golden models in the format of the released code; test_fork_lm.py has one that
the released code saved.
"""

import dataclasses
import json

import pytest
import torch
from fairseq.criterions import build_criterion
from fairseq.modules import AdaptiveInput, AdaptiveSoftmax
from fairseq.tasks import setup_task
from torch import nn

from mega_fairseq.cli.convert.command import configuration
from mega_fairseq.cli.convert.families import LANGUAGE
from mega_fairseq.cli.convert.names import translate
from mega_fairseq.models import MegaLanguageModel, MegaLMConfig
from tests.helpers import golden_cases as golden
from tests.helpers import released
from tests.helpers.golden_checks import assert_outputs
from tests.helpers.golden_models import PAD, task
from tests.helpers.released import (
    checkpoint,
    convert,
    load,
    refuse_content,
    with_tensors,
    without,
)

pytestmark = pytest.mark.skipif(not released.READS_SAFELY, reason=released.NEEDS_TORCH)
RELEASED = json.loads((golden.FOLDER / "released_options_mega_lm.json").read_text())
SHARED = "ce_softmax_rotary_chunk8"
ADAPTIVE, NARROW = "adaptive_untied_simple_chunk8", "ce_embnorm_inputdim24_relu2"
CUTOFF, TYPES, DIM = [16, 28], 40, 32  # of the adaptive case


def model(name):
    return released.model(name, "mega_lm")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder with the dictionary of the golden models."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "dict.txt").write_text("".join(f"w{i} 1\n" for i in range(TYPES - 4)))
    return folder


def each_model():
    return pytest.mark.parametrize("case", released.models("language model"), ids=lambda case: case.name)


def assert_log_probs(case, ours, name):
    real = case.inputs["target"] != PAD
    with torch.no_grad():
        y = ours(case.inputs["src_tokens"], target=case.inputs["target"])[0].squeeze(-1)
    tolerance = 1e-4 if case.config["adaptive_softmax_cutoff"] else 1e-5
    assert_outputs(y[real], case.outputs[name][real], name, tolerance)


# -------------------------------------------------------------------------------------- numbers


@each_model()
def test_a_converted_model_computes_the_released_log_probabilities(case, converted, data):
    for chunk, chunks in case.config["evals"]:
        ours, _ = load(converted(case), data, decoder_chunk_size=chunk)
        ours.decoder.cfg.piece_tokens = case.inputs["target"].size(0) * chunk * chunks
        assert_log_probs(case, ours, f"seq_chunk{chunk}_nums{chunks}")


@each_model()
def test_with_truncation_restored_it_equals_the_trained_model(case, converted, data):
    ours, _ = load(converted(case), data, decoder_truncation_length=case.config["truncation_length"])
    assert_log_probs(case, ours, "whole_chunk8")


@each_model()
def test_the_criterion_sums_over_all_targets(case, converted, data):
    ours, cfg = load(converted(case), data)
    target = case.inputs["target"]
    sample = {"net_input": {"src_tokens": case.inputs["src_tokens"]}, "target": target, "ntokens": 1}
    loss, _, _ = build_criterion(cfg.criterion, setup_task(cfg.task))(ours, sample)
    total = -case.outputs["seq_chunk8_nums1"][target != PAD].sum()
    torch.testing.assert_close(loss, total, atol=1e-3, rtol=0)


# -------------------------------------------------------------------------------------- tied adaptive embeddings


def stock_adaptive(tie_proj):
    """fairseq's own modules, whose tensor names the release uses, with the embeddings of the adaptive case."""
    embeddings = AdaptiveInput(TYPES, PAD, DIM, 4.0, DIM, CUTOFF)
    prefix = "decoder.embed_tokens."
    given = {n[len(prefix) :]: t for n, t in model(ADAPTIVE).parameters.items() if n.startswith(prefix)}
    embeddings.load_state_dict(given)
    softmax = AdaptiveSoftmax(TYPES, DIM, CUTOFF, 0.0, factor=4.0, adaptive_inputs=embeddings, tie_proj=tie_proj)
    return nn.ModuleDict({"embed_tokens": embeddings, "adaptive_softmax": softmax}).eval()


def tied(stock, **options):
    """The adaptive case with its softmax tied to its embeddings."""
    content = checkpoint(model(ADAPTIVE), tie_adaptive_weights=True, criterion="adaptive_loss", **options)
    kept = {name: t for name, t in content["model"].items() if "adaptive_softmax" not in name}
    of_stock = {f"decoder.{name}": tensor for name, tensor in stock.state_dict().items()}
    return {**content, "model": {**kept, **of_stock}}


@pytest.mark.parametrize("tie_proj", [True, False])
def test_a_tied_adaptive_softmax_equals_fairseqs_module(tie_proj, tmp_path, data):
    case, stock = model(ADAPTIVE), stock_adaptive(tie_proj)
    target, features = case.inputs["target"], case.outputs["logits_or_features"]  # inputs of the softmax
    with torch.no_grad():
        lprobs = stock["adaptive_softmax"].get_log_prob(features, None).gather(-1, target.unsqueeze(-1)).squeeze(-1)
    ours, _ = load(convert(tied(stock, tie_adaptive_proj=tie_proj), tmp_path), data)
    softmax, bands = ours.decoder.adaptive_softmax, ours.decoder.embed_tokens.embeddings
    for i, band in enumerate(bands):
        assert (softmax.tail[i - 1][2] if i else softmax.head.word_proj).weight is band[0].weight
        assert i == 0 or (softmax.tail[i - 1][0].weight is band[1].weight) == tie_proj
    assert_log_probs(dataclasses.replace(case, outputs={"lprobs": lprobs}), ours, "lprobs")


# -------------------------------------------------------------------------------------- content of the file


@pytest.mark.parametrize("name", [SHARED, ADAPTIVE, NARROW])
def test_options_and_tensors_are_kept(name, tmp_path, data):
    given = {"dropout": 0.3, "hidden_dropout": 0.1, "adaptive_softmax_dropout": 0.2, "no_scale_embedding": True}
    content = checkpoint(model(name), **given)
    ours, cfg = load(convert(content, tmp_path), data)
    settled = {"_name", "truncation_length", "max_target_positions"}
    for option in {field.name for field in dataclasses.fields(MegaLMConfig)} - settled:
        default = getattr(MegaLMConfig, option)
        assert cfg.model[option] == getattr(content["args"], option, default), option
    expected = translate(content["model"])
    for name, tensor in ours.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


def test_options_without_effect_in_the_release_are_accepted(tmp_path, data):
    idle = {"share_decoder_input_output_embed": True, "tie_adaptive_proj": True}
    ours, _ = load(convert(checkpoint(model(ADAPTIVE), **idle), tmp_path), data)
    assert_log_probs(model(ADAPTIVE), ours, "whole_chunk8")


@pytest.mark.parametrize(
    ("arch", "number_of_types", "options", "millions"),
    [
        ("mega_lm_wiki103", 267_744, {"decoder_chunk_size": 1024}, 252.24),
        ("mega_lm_enwik8_base", 208, {"decoder_chunk_size": 2048, "share_decoder_input_output_embed": True}, 39.14),
    ],
)
def test_released_architectures_have_the_published_sizes(arch, number_of_types, options, millions):
    recipe = {"normalize_before": True, "no_affine_final_norm": True, "rel_pos_bias": "rotary", **options}
    of_task = {**released.OF_LANGUAGE_MODELLING, "data": "data-bin", "max_target_positions": None}
    given = {**RELEASED["arch_defaults"][arch], **of_task, **recipe, "arch": arch}
    cfg = configuration(given, LANGUAGE, {})
    with torch.device("meta"):
        made = MegaLanguageModel.build_model(cfg.model, task(number_of_types))
    assert round(sum(parameter.numel() for parameter in made.parameters()) / 1e6, 2) == millions


# -------------------------------------------------------------------------------------- errors


def normal(**options):
    return checkpoint(model(SHARED), **options)


def bands(**options):
    return checkpoint(model(ADAPTIVE), **options)


def tied_bands():
    return tied(stock_adaptive(True), tie_adaptive_proj=True)


TABLES = [f"decoder.embed_tokens.embeddings.{i}.0.weight" for i in (0, 1, 2)]
VERSION = "decoder.adaptive_softmax.version"
REFUSED = {
    "streams that are filled in later": (lambda: normal(valid_block="size:${x}"), "valid_block"),
    "cutoffs beyond the types": (lambda: bands(adaptive_input_cutoff="16,99"), "invalid model options"),
    "a table in place of bands": (
        lambda: normal(adaptive_input=True, adaptive_input_cutoff="16,28"),
        "invalid model options",
    ),
    "missing version of the softmax": (lambda: without(bands(), VERSION), VERSION),
    "tied tables that differ": (lambda: with_tensors(tied_bands(), **{TABLES[1]: torch.ones(12, 8)}), TABLES[1]),
    "tied tensors under untied options": (
        lambda: {**tied_bands(), "args": bands()["args"]},
        "decoder.adaptive_softmax.head",
    ),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_unsupported_and_damaged_checkpoints_are_refused(reason, tmp_path, capsys):
    make, words = REFUSED[reason]
    refuse_content(make(), words, tmp_path, capsys)
