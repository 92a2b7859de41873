"""`mega-fairseq convert` refuses unsupported and damaged checkpoints, and writes nothing."""

import math

import pytest
import torch

from tests.helpers import released
from tests.helpers.released import model, save, tied_bands

pytestmark = pytest.mark.skipif(not released.READS_SAFELY, reason=released.NEEDS_TORCH)
HEAD = "classification_heads.other."
SECOND_HEAD = {HEAD + "hidden.0.weight": (20, 24), HEAD + "hidden.0.bias": (20,), HEAD + "out.weight": (2, 20)}
HIDDEN, OUT = ("classifier.0.0.weight", "classifier.0.0.bias"), "sentence_projection_layer.weight"
TABLE, VERSION = "decoder.embed_tokens.embeddings.1.0.weight", "decoder.adaptive_softmax.version"


def translation(**options):
    return released.checkpoint(model("model_pre_softmax_rotary_chunk8_rightpad"), **options)


def language(**options):
    return released.checkpoint(model("lm_ce_softmax_rotary_chunk8"), **options)


def bands(**options):
    return released.checkpoint(model("lm_adaptive_untied_simple_chunk8"), **options)


def tied():
    return tied_bands(model("lm_adaptive_untied_simple_chunk8"), True)[0]


def text(**options):
    return released.checkpoint(model("listops_full_softmax_layernorm_mp"), **options)


def image(**options):
    return released.checkpoint(model("image_full_softmax_layernorm_prenorm_mp"), **options)


def without(content, *names):
    return {**content, "model": {name: tensor for name, tensor in content["model"].items() if name not in names}}


def with_tensors(content, tensors):
    return {**content, "model": {**content["model"], **tensors}}


def without_option(content, name):
    del vars(content["args"])[name]
    return content


CODE = "__import__('os').abort()"
NAN, EXTRA = {"encoder.final_norm.norm.bias": torch.full((32,), math.nan)}, {"decoder.extra": torch.ones(1)}
SHORT = {"encoder.layers.0.mega_layer.mx_proj.weight": torch.ones(3, 32)}
REFUSED = {
    "stock transformer": (lambda: translation(arch="transformer_iwslt_de_en"), "'transformer_iwslt_de_en'"),
    "missing option": (lambda: without_option(translation(), "no_scale_embedding"), "the option no_scale_embedding"),
    "option of another type": (lambda: translation(dropout="often"), "'often'"),
    "option that contains code": (lambda: translation(adaptive_softmax_cutoff=CODE), "--adaptive-softmax-cutoff"),
    "option with an interpolation": (lambda: translation(source_lang="${oc.env:HOME}"), "source_lang"),
    "interpolation in the task": (lambda: language(valid_block="size:${x}"), "valid_block"),
    "interpolation in a list": (lambda: image(pixel_normalization=["${oc.env:HOME}", 1.0]), "values_mean"),
    "unknown tensor": (lambda: with_tensors(translation(), EXTRA), "decoder.extra"),
    "tensor with NaN": (lambda: with_tensors(translation(), NAN), "NaN or infinity in 1"),
    "tensor too small to be split": (lambda: with_tensors(translation(), SHORT), "do not fit together"),
    "tied embeddings that differ": (
        lambda: translation(share_decoder_input_output_embed=True),
        "decoder.output_projection.weight",
    ),
    "cutoffs beyond the types": (lambda: bands(adaptive_input_cutoff="16,99"), "invalid model options"),
    "a table in place of bands": (
        lambda: language(adaptive_input=True, adaptive_input_cutoff="16,28"),
        "invalid model options",
    ),
    "missing version of the softmax": (lambda: without(bands(), VERSION), VERSION),
    "tied tables that differ": (lambda: with_tensors(tied(), {TABLE: torch.ones(12, 8)}), TABLE),
    "tied tensors under untied options": (lambda: {**tied(), "args": bands()["args"]}, "decoder.adaptive_softmax.head"),
    "unknown pooling": (lambda: text(sen_rep_type="max"), "max"),
    "other activation in the head": (lambda: text(classifier_activation_fn="relu"), "'relu'"),
    "pairs in the options only": (lambda: text(classifier_in_dim=48), "hidden.0.weight"),
    "missing head": (lambda: without(text(), OUT, *HIDDEN), "contains 0 heads"),
    "two heads": (
        lambda: with_tensors(text(), {name: torch.ones(shape) for name, shape in SECOND_HEAD.items()}),
        "contains 2 heads",
    ),
    "longer bias than the inputs": (lambda: text(max_positions=47), "position_bias"),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_unsupported_and_damaged_checkpoints_are_refused(reason, tmp_path, refuses):
    make, words = REFUSED[reason]
    source = save(make(), tmp_path / "any.pt")
    refuses("convert", source, tmp_path / "ours.pt", words=[f"convert: {source} ", words])


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "pytorch_model.bin"])
def test_one_file_of_a_folder_leads_to_the_folder(name, tmp_path, refuses):
    (tmp_path / name).write_text("{}")
    refuses("convert", tmp_path / name, tmp_path / "ours.pt", words=[name, f"folder, {tmp_path}"])


def test_an_output_that_is_a_folder_is_refused(tmp_path, refuses):
    source = save(translation(), tmp_path / "any.pt")
    refuses("convert", source, f"{tmp_path}/new/", words=[f"{tmp_path}/new/ is a folder"])


@pytest.mark.parametrize(
    ("make", "content", "words"),
    [
        (text, b"a 3\nb 2\nc 1\n", "--labels names 3"),
        (text, b"\xff 1\n", "--labels"),
        (image, b"a 1\n" * 4, "--labels"),
    ],
)
def test_labels_that_do_not_fit_are_refused(make, content, words, tmp_path, refuses):
    (tmp_path / "dict.txt").write_bytes(content)
    source = save(make(), tmp_path / "any.pt")
    refuses("convert", source, tmp_path / "ours.pt", "--labels", tmp_path / "dict.txt", words=[words])


def test_a_torch_that_would_execute_code_is_refused(tmp_path, refuses, monkeypatch):
    source = save(translation(), tmp_path / "old.pt")
    monkeypatch.delattr(torch.serialization, "get_unsafe_globals_in_checkpoint")
    refuses("convert", source, tmp_path / "ours.pt", words=["torch 2.6"])
