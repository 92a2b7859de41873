"""`mega-fairseq convert` with translation models: released outputs, and options that fairseq loads.

The checkpoints are golden models in the format of the released code (tests/helpers/released.py).
"""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch

from mega_fairseq.cli.convert.command import configuration
from mega_fairseq.cli.convert.families import CLASSIFICATION, LANGUAGE, TRANSLATION, family_of
from mega_fairseq.cli.convert.names import translate
from mega_fairseq.cli.main import main
from mega_fairseq.models import MegaClassifierConfig, MegaLMConfig, MegaTransformerConfig
from tests.helpers import golden_cases as golden
from tests.helpers.commands import PLUGIN, fairseq
from tests.helpers.golden_checks import assert_outputs
from tests.helpers.released import (
    NEEDS_TORCH,
    READS_SAFELY,
    checkpoint,
    convert,
    load,
    model,
    models,
    refuse,
    refuse_content,
    save,
    with_tensors,
    without_option,
)

pytestmark = pytest.mark.skipif(not READS_SAFELY, reason=NEEDS_TORCH)
POST, PRE = "post_softmax_simple_full_rightpad", "pre_softmax_rotary_chunk8_rightpad"
SYMBOLS = 36  # and bos, pad, eos, unk


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder with the dictionaries of the golden models."""
    folder = tmp_path_factory.mktemp("data")
    for language in ("de", "en"):
        (folder / f"dict.{language}.txt").write_text("".join(f"w{i} 1\n" for i in range(SYMBOLS)))
    return folder


def logits(ours, tokens, previous):
    with torch.no_grad():
        return ours(tokens, None, previous)[0]


def each_model():
    return pytest.mark.parametrize("case", models(), ids=lambda case: case.name)


# -------------------------------------------------------------------------------------- numbers


@each_model()
def test_a_converted_model_computes_the_released_logits(case, converted, data):
    # In the truncated case the release trains and decodes different models: see the next tests.
    overrides = {"decoder_truncation_length": -1} if case.name.endswith("trunc4") else {}
    ours, _ = load(converted(case), data, **overrides)
    y = logits(ours, case.inputs["src_tokens"], case.inputs["prev_output_tokens"])
    for row, real in enumerate(case.inputs["prev_output_tokens"] != 1):
        assert_outputs(y[row, real], case.outputs[f"logits_alone_{row}"], f"logits of sentence {row}")


@each_model()
def test_it_computes_the_released_logits_of_decoding(case, converted, data):
    ours, _ = load(converted(case), data)
    released = case.outputs["logits_incremental"]
    y = logits(ours, case.inputs["src_tokens"], case.inputs["prev_output_tokens"][:, : released.size(1)])
    # The release shifts the bias by left pads.
    right = ~torch.tensor([bool(row[0] == 1) for row in case.inputs["src_tokens"]])
    assert right.any()
    assert_outputs(y[right], released[right], "logits step by step")


@pytest.mark.parametrize("how", [{}, {"_use_new_zipfile_serialization": False}], ids=["zip", "legacy"])
def test_a_half_precision_checkpoint_keeps_its_precision(how, tmp_path, data):
    case, content = model(POST), checkpoint(model(POST), fp16=True)
    content["model"] = {name: tensor.half() for name, tensor in content["model"].items()}
    path = convert(content, tmp_path, **how)
    assert {t.dtype for t in torch.load(path, weights_only=True)["model"].values()} == {torch.float16}
    ours, _ = load(path, data)
    y, released = logits(ours, case.inputs["src_tokens"], case.inputs["prev_output_tokens"]), case.outputs["logits"]
    real = case.inputs["prev_output_tokens"] != 1
    assert (y[real] - released[real]).abs().max() < 2e-2


# -------------------------------------------------------------------------------------- content of the file


def test_a_converted_checkpoint_is_plain_data_like_fairseqs(converted):
    path = converted(model(POST))
    assert torch.serialization.get_unsafe_globals_in_checkpoint(path) == []
    state = torch.load(path, weights_only=True)
    assert state["args"] is None
    assert state["last_optimizer_state"] is None
    assert {"common", "task", "model", "criterion", "generation", "checkpoint"} <= set(state["cfg"])
    assert state["cfg"]["model"]["_name"] == "mega_transformer"
    assert {field.name for field in dataclasses.fields(MegaTransformerConfig)} == set(state["cfg"]["model"])
    of_task = {"_name": "translation", "source_lang": "de", "target_lang": "en", "left_pad_source": True}
    assert of_task.items() <= state["cfg"]["task"].items()
    assert state["cfg"]["criterion"]["label_smoothing"] == 0.1


def test_tied_tensors_are_saved_once(tmp_path):
    content = checkpoint(model(POST))  # all embeddings tied
    tensors = content["model"]
    for name in ("decoder.embed_tokens.weight", "decoder.output_projection.weight"):
        tensors[name] = tensors["encoder.embed_tokens.weight"]
    state = torch.load(convert(content, tmp_path), weights_only=True)["model"]
    stored = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in state.values()}
    drop = ("decoder.embed_tokens.weight", "decoder.output_projection.weight", "encoder.version", "decoder.version")
    assert sum(stored.values()) == sum(4 * t.numel() for name, t in tensors.items() if name not in drop)


def with_other_norms(case, kind, **options):
    """A checkpoint of the case with norms of another kind, and with embedding norms if the options enable them."""
    content = checkpoint(case, normalization_type=kind, **options)
    tensors = content["model"]
    if options.get("normalize_embedding"):
        for side in ("encoder", "decoder"):
            tensors[f"{side}.embed_norm.norm.weight"] = torch.rand(case.config["encoder_embed_dim"])
            tensors[f"{side}.embed_norm.norm.bias"] = torch.zeros(case.config["encoder_embed_dim"])
    for name in [name for name in tensors if "norm.norm." in name]:
        tensor = tensors.pop(name)
        if name.endswith(".weight"):
            stem = name[: -len("weight")]
            tensors.update({f"{stem}scalar": tensor[:1]} if kind == "scalenorm" else {name: tensor})
    return content


@pytest.mark.parametrize(
    ("name", "kind", "options"),
    [
        (POST, "scalenorm", {"normalize_embedding": True, "activation_fn": "gelu_fast"}),
        (PRE, "rmsnorm", {"hidden_dropout": 0.1, "attention_dropout": 0.1, "activation_dropout": 0}),
    ],
)
def test_options_and_tensors_are_kept(name, kind, options, tmp_path, data):
    content = with_other_norms(model(name), kind, **options)
    ours, cfg = load(convert(content, tmp_path), data)
    for option, value in {"normalization_type": kind, **options}.items():
        assert cfg.model[option] == value
    parameters = ours.state_dict()
    assert set(parameters) <= set(translate(content["model"]))
    for option, tensor in translate(content["model"]).items():
        assert option not in parameters or torch.equal(parameters[option], tensor)


def test_a_log_with_bleu_statistics_of_any_numpy_is_read(tmp_path, capsys):
    content = checkpoint(model(PRE))
    content["extra_state"]["metrics"]["valid"] = [(100, "_bleu_counts", "AverageMeter", {"sum": np.arange(4)})]
    source = save(content, tmp_path / "old.pt", _use_new_zipfile_serialization=False)  # stores names as lines
    for module in (b"numpy.core.multiarray", b"numpy._core.multiarray"):
        written = source.read_bytes().replace(b"numpy._core.multiarray", b"numpy.core.multiarray")
        source.write_bytes(written.replace(b"numpy.core.multiarray", module))
        assert main(["convert", str(source), str(tmp_path / f"{len(module)}.pt")]) == 0, capsys.readouterr().err


# -------------------------------------------------------------------------------------- options


FAMILIES = {
    "mega": (TRANSLATION, MegaTransformerConfig),
    "mega_lm": (LANGUAGE, MegaLMConfig),
    "mega_classifier": (CLASSIFICATION, MegaClassifierConfig),
}
# Released options that change nothing: they print, belong to other layers than Mega's, or say what the tensors say.
IDLE = {
    *("report_ema_alpha", "write_out_alpha", "apply_bert_init", "layer_type", "use_p", "sent_loss"),
    *("encoder_attention_heads", "share_encoder_input_output_embed", "encoder_learned_pos", "sentence_class_num"),
    *("no_token_positional_embeddings", "encoder_projection_length", "no_scale_embedding"),
    *("quant_noise_pq", "quant_noise_pq_block_size", "quant_noise_scalar"),
    *("encoder_projected_attention_heads", "decoder_projected_attention_heads"),
}
OF_THE_TASK = {"input_type", "classifier_activation_fn"}  # or of one value only
OF_THE_COMMAND = {  # what no architecture sets, or not every one
    "data": "data-bin",
    "left_pad_source": "False",
    **dict.fromkeys(("max_source_positions", "max_target_positions"), 64),
    "rel_pos_bias": "simple",
    "norm_type": "scalenorm",
    "activation_dropout": 0.0,
}


def released_options(name):
    return json.loads((golden.FOLDER / f"released_options_{name}.json").read_text())


@pytest.mark.parametrize("name", FAMILIES)
def test_every_released_option_has_the_same_type_and_choices_here(name):
    family, config = FAMILIES[name]
    types = {field.name: field.type for field in dataclasses.fields(config)}
    options = {option["name"]: option for option in released_options(name)["options"]}
    ours = {family.names.get(option, option): option for option in types}
    assert set(options) - IDLE - OF_THE_TASK <= set(ours)
    python = {"int": int, "float": float, "_StoreTrueAction": bool}
    for option in set(options) & set(ours):
        kind, choices = types[ours[option]], options[option]["choices"] or ()
        assert kind == python.get(options[option]["type"], kind), option
        for choice in choices:
            value = family.values.get(ours[option], {}).get(choice, choice)
            assert kind(value) == value


@pytest.mark.parametrize("name", FAMILIES)
def test_every_released_architecture_is_accepted_with_its_defaults(name):
    family, config = FAMILIES[name]
    released = released_options(name)
    assert set(family.archs) == set(released["arch_defaults"])
    for arch, given in released["arch_defaults"].items():
        assert family_of({"arch": arch}) is family
        options = {**OF_THE_COMMAND, **given}
        cfg = configuration(options, family, {})
        for option in {field.name for field in dataclasses.fields(config)} - {"truncation_length"}:
            value = options.get(family.names.get(option, option), cfg.model[option])
            assert cfg.model[option] == family.values.get(option, {}).get(value, value)
        if family is TRANSLATION:
            assert cfg.task.left_pad_source is False


# -------------------------------------------------------------------------------------- errors


def normal(**options):
    return checkpoint(model(PRE), **options)


BIAS = "encoder__final_norm__norm__bias"
REFUSED = {
    "stock transformer, old": (lambda: normal(arch="transformer_iwslt_de_en"), "'transformer_iwslt_de_en'"),
    "missing option": (lambda: without_option(normal(), "no_scale_embedding"), "the option no_scale_embedding"),
    "option of another type": (lambda: normal(dropout="often"), "'often'"),
    "option that contains code": (
        lambda: normal(adaptive_softmax_cutoff="__import__('os').abort()"),
        "--adaptive-softmax-cutoff",
    ),
    "option with an interpolation": (lambda: normal(source_lang="${oc.env:HOME}"), "source_lang"),
    "unknown tensor": (lambda: with_tensors(normal(), decoder__extra=torch.ones(1)), "decoder.extra"),
    "tensor with NaN": (lambda: with_tensors(normal(), **{BIAS: torch.full((32,), math.nan)}), "NaN or infinity in 1"),
    "tensor too small to be split": (
        lambda: with_tensors(normal(), encoder__layers__0__mega_layer__mx_proj__weight=torch.ones(3, 32)),
        "do not fit together",
    ),
    "tied embeddings that differ": (
        lambda: normal(share_decoder_input_output_embed=True),
        "decoder.output_projection.weight",
    ),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_unsupported_and_damaged_checkpoints_are_refused(reason, tmp_path, capsys):
    make, words = REFUSED[reason]
    refuse_content(make(), words, tmp_path, capsys)


def test_a_torch_that_would_execute_code_is_refused(tmp_path, capsys, monkeypatch):
    source = save(normal(), tmp_path / "old.pt")
    monkeypatch.delattr(torch.serialization, "get_unsafe_globals_in_checkpoint")
    refuse(capsys, source, tmp_path / "ours.pt", words=["torch 2.6"])


# -------------------------------------------------------------------------------------- fairseq commands


@pytest.fixture(scope="module")
def binarised(tmp_path_factory, data):
    """Eight binarised sentences for each split."""
    folder = tmp_path_factory.mktemp("text")
    for split in ("train", "valid", "test"):
        for language in ("de", "en"):
            lines = [" ".join(f"w{(i * j) % SYMBOLS}" for j in range(1, 4 + i)) for i in range(8)]
            (folder / f"{split}.{language}").write_text("\n".join(lines) + "\n")
    prefixes = [f"--{split}pref={folder / split}" for split in ("train", "valid", "test")]
    dictionaries = [f"--srcdict={data / 'dict.de.txt'}", f"--tgtdict={data / 'dict.en.txt'}"]
    fairseq("preprocess", "-s", "de", "-t", "en", *prefixes, *dictionaries, "--destdir", folder / "bin")
    return folder / "bin"


@pytest.mark.slow
def test_fairseq_generate_translates_with_a_converted_model(converted, binarised):
    said = fairseq(
        "generate", binarised, *PLUGIN, "--path", converted(model(POST)), "--cpu",
        "--required-batch-size-multiple", 1, "--beam", 5, "--max-len-b", 20,
    )  # fmt: skip
    assert sum(line.startswith("H-") for line in said.splitlines()) == 8


@pytest.mark.slow
def test_fairseq_train_starts_from_a_converted_model(converted, binarised, tmp_path):
    case = model(PRE)
    sizes = [
        argument
        for name, value in case.config.items()
        if name.startswith(("encoder_", "decoder_")) and isinstance(value, int) and name != "decoder_input_dim"
        for argument in (f"--{name.replace('_', '-')}", value)
    ]
    said = fairseq(
        "train", binarised, *PLUGIN, "--restore-file", converted(case), "--arch", "mega_transformer",
        *sizes, "--normalize-before", "--rel-pos-bias", "rotary", "--max-source-positions", 64,
        "--max-target-positions", 64, "--truncation-length", 1024, "--decoder-truncation-length", 0,
        "--dropout", 0, "--optimizer", "adam", "--lr", 0,
        "--max-update", 1, "--max-tokens", 400, "--required-batch-size-multiple", 1, "--cpu",
        "--save-dir", tmp_path,
    )  # fmt: skip
    assert "Loaded checkpoint" in said
    before = torch.load(converted(case), weights_only=True)["model"]
    after = torch.load(tmp_path / "checkpoint_last.pt", weights_only=True)
    assert after["optimizer_history"][-1]["num_updates"] == 1
    assert set(after["model"]) == set(before)
    for name, tensor in before.items():  # the learning rate is 0
        assert torch.equal(after["model"][name], tensor)
    assert "valid on 'valid' subset" in said
