"""`mega-fairseq convert`: released outputs, the content of its files, and options and tensors that fairseq loads.

The checkpoints are golden models in the format of the released code (tests/helpers/released.py).
"""

import dataclasses
import json

import numpy as np
import pytest
import torch

from mega_fairseq.cli.convert.command import configuration
from mega_fairseq.cli.convert.families import CLASSIFICATION, LANGUAGE, TRANSLATION, family_of
from mega_fairseq.cli.convert.names import translate
from mega_fairseq.cli.main import main
from mega_fairseq.models import MegaClassifierConfig, MegaLMConfig, MegaTransformerConfig
from tests.helpers import golden_cases as golden
from tests.helpers import released
from tests.helpers.commands import PLUGIN, fairseq
from tests.helpers.golden_checks import assert_outputs, each
from tests.helpers.golden_models import PAD, dictionary
from tests.helpers.released import checkpoint, convert, load, model, save, tied_bands

pytestmark = pytest.mark.skipif(not released.READS_SAFELY, reason=released.NEEDS_TORCH)
POST, PRE = "model_post_softmax_simple_full_rightpad", "model_pre_softmax_rotary_chunk8_rightpad"
SHARED, NARROW, ADAPTIVE = (
    "lm_ce_softmax_rotary_chunk8",
    "lm_ce_embnorm_inputdim24_relu2",
    "lm_adaptive_untied_simple_chunk8",
)
TEXT, IMAGE, SPEECH = (
    "listops_full_softmax_layernorm_mp",
    "image_full_softmax_layernorm_prenorm_mp",
    "sc_raw_chunk16_laplace_batchnorm_prenorm_trunc16_mp",
)
TYPES = 40  # of all golden models


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder with the dictionaries of the golden models: bos, pad, eos, unk and words."""
    folder = tmp_path_factory.mktemp("data")
    for name in ("dict.txt", "dict.de.txt", "dict.en.txt"):
        dictionary(TYPES).save(str(folder / name))
    return folder


def state(path):
    return torch.load(path, weights_only=True)


# -------------------------------------------------------------------------------------- numbers


def assert_log_probs(case, ours, name):
    real = case.inputs["target"] != PAD
    with torch.no_grad():
        y = ours(case.inputs["src_tokens"], target=case.inputs["target"])[0].squeeze(-1)
    tolerance = 1e-4 if case.config["adaptive_softmax_cutoff"] else 1e-5
    assert_outputs(y[real], case.outputs[name][real], name, tolerance)


@each("classifier")
def test_a_converted_classifier_reads_inputs_as_released(case, converted):
    options = state(converted(case))["cfg"]
    text = case.config["vocabulary"] is not None
    assert options["criterion"]["_name"] == "sentence_prediction"
    expected = {
        "_name": "mega_classification",
        "max_positions": case.config["max_positions"],
        "input_kind": "tokens" if text else "values",
        "shorten_method": "truncate" if text else "none",
        "init_token": TYPES - 1 if case.config["sen_rep_type"] == "cls" else None,
    }
    assert expected.items() <= options["task"].items()


@pytest.mark.parametrize("how", [{}, {"_use_new_zipfile_serialization": False}], ids=["zip", "legacy"])
def test_a_half_precision_checkpoint_keeps_its_precision(how, tmp_path, data):
    case, content = model(POST), checkpoint(model(POST), fp16=True)
    content["model"] = {name: tensor.half() for name, tensor in content["model"].items()}
    path = convert(content, tmp_path, **how)
    assert {t.dtype for t in state(path)["model"].values()} == {torch.float16}
    ours, _ = load(path, data)
    with torch.no_grad():
        y, _ = ours(case.inputs["src_tokens"], None, case.inputs["prev_output_tokens"])
    real = case.inputs["target"] != PAD
    assert (y[real] - case.outputs["logits"][real]).abs().max() < 2e-2


@pytest.mark.parametrize("tie_proj", [True, False])
def test_a_tied_adaptive_softmax_equals_fairseqs_module(tie_proj, tmp_path, data):
    case, (content, stock) = model(ADAPTIVE), tied_bands(model(ADAPTIVE), tie_proj)
    target, features = case.inputs["target"], case.outputs["logits_or_features"]  # inputs of the softmax
    with torch.no_grad():
        lprobs = stock.get_log_prob(features, None).gather(-1, target.unsqueeze(-1)).squeeze(-1)
    ours, _ = load(convert(content, tmp_path), data)
    softmax, bands = ours.decoder.adaptive_softmax, ours.decoder.embed_tokens.embeddings
    for i, band in enumerate(bands):
        assert (softmax.tail[i - 1][2] if i else softmax.head.word_proj).weight is band[0].weight
        assert i == 0 or (softmax.tail[i - 1][0].weight is band[1].weight) == tie_proj
    assert_log_probs(dataclasses.replace(case, outputs={"lprobs": lprobs}), ours, "lprobs")


# -------------------------------------------------------------------------------------- content of the file


def test_a_converted_checkpoint_is_plain_data_like_fairseqs(converted):
    path = converted(model(POST))
    assert torch.serialization.get_unsafe_globals_in_checkpoint(path) == []
    content = state(path)
    assert (content["args"], content["last_optimizer_state"]) == (None, None)
    assert {"common", "task", "model", "criterion", "generation", "checkpoint"} <= set(content["cfg"])
    assert content["cfg"]["model"]["_name"] == "mega_transformer"
    assert {field.name for field in dataclasses.fields(MegaTransformerConfig)} == set(content["cfg"]["model"])
    of_task = {"_name": "translation", "source_lang": "de", "target_lang": "en", "left_pad_source": True}
    assert of_task.items() <= content["cfg"]["task"].items()
    assert content["cfg"]["criterion"]["label_smoothing"] == 0.1
    assert state(converted(model(SHARED)))["cfg"]["criterion"]["_name"] == "mega_lm_cross_entropy"


def test_tied_tensors_are_saved_once(tmp_path):
    content = checkpoint(model(POST))  # all embeddings tied
    tensors = content["model"]
    for name in ("decoder.embed_tokens.weight", "decoder.output_projection.weight"):
        tensors[name] = tensors["encoder.embed_tokens.weight"]
    stored = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in state(convert(content, tmp_path))["model"].values()
    }
    drop = ("decoder.embed_tokens.weight", "decoder.output_projection.weight", "encoder.version", "decoder.version")
    assert sum(stored.values()) == sum(4 * t.numel() for name, t in tensors.items() if name not in drop)


def test_a_log_with_bleu_statistics_of_any_numpy_is_read(tmp_path, capsys):
    content = checkpoint(model(PRE))
    content["extra_state"]["metrics"]["valid"] = [(100, "_bleu_counts", "AverageMeter", {"sum": np.arange(4)})]
    source = save(content, tmp_path / "old.pt", _use_new_zipfile_serialization=False)  # stores names as lines
    for module in (b"numpy.core.multiarray", b"numpy._core.multiarray"):
        written = source.read_bytes().replace(b"numpy._core.multiarray", b"numpy.core.multiarray")
        source.write_bytes(written.replace(b"numpy.core.multiarray", module))
        assert main(["convert", str(source), str(tmp_path / f"{len(module)}.pt")]) == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "names", "said", "stored"),
    [
        (TEXT, ["9", "0", "yes", "4"], "classes in order: 9, 0, yes, 4", {"classes": ["9", "0", "yes", "4"]}),
        (TEXT, [], "--labels", {}),
        (IMAGE, [], "classes in order: 0, 1, 2, 3", {"classes": ["0", "1", "2", "3"]}),
        (SPEECH, [], "classes in order: 0, 1, 2, 3", {"classes": ["0", "1", "2", "3"]}),
    ],
)
def test_names_of_classes_are_stored_in_the_dictionarys_order(name, names, said, stored, tmp_path, capsys):
    (tmp_path / "dict.txt").write_text("".join(f"{label} 9\n" for label in names) + "madeupword0000 0\n")
    path = convert(checkpoint(model(name)), tmp_path, options=["--labels", tmp_path / "dict.txt"] if names else [])
    assert said in capsys.readouterr().out
    assert state(path)["task_state"] == stored


# -------------------------------------------------------------------------------------- options


OF_NETWORK = {"dropout": 0.3, "hidden_dropout": 0.1, "adaptive_softmax_dropout": 0.2, "no_scale_embedding": True}


@pytest.mark.parametrize("name", [PRE, SHARED, ADAPTIVE, NARROW])
def test_options_and_tensors_are_kept(name, tmp_path, data):
    content = checkpoint(model(name), **OF_NETWORK)
    ours, cfg = load(convert(content, tmp_path), data)
    for option, value in vars(content["args"]).items():
        if option in cfg.model and option not in ("truncation_length", "max_target_positions"):
            assert cfg.model[option] == value, option
    expected = translate(content["model"])
    for tensor_name, tensor in ours.state_dict().items():
        assert tensor_name not in expected or torch.equal(tensor, expected[tensor_name]), tensor_name


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        (IMAGE, {"pixel_normalization": [0.48, 0.24]}, (0.48, 0.24)),
        (IMAGE, {"pixel_normalization": None}, (0.5, 0.5)),
        (SPEECH, {}, (0.0, 1.0)),
    ],
)
def test_values_are_normalised_as_in_the_release(name, options, expected, tmp_path):
    of_task = state(convert(checkpoint(model(name), **options), tmp_path))["cfg"]["task"]
    assert (of_task["values_mean"], of_task["values_deviation"]) == expected


def test_options_without_effect_in_the_release_are_accepted(tmp_path, data):
    idle = {"share_decoder_input_output_embed": True, "tie_adaptive_proj": True}
    ours, _ = load(convert(checkpoint(model(ADAPTIVE), **idle), tmp_path), data)
    assert_log_probs(model(ADAPTIVE), ours, "whole_chunk8")


FAMILIES = {
    "mega": (TRANSLATION, MegaTransformerConfig),
    "mega_lm": (LANGUAGE, MegaLMConfig),
    "mega_classifier": (CLASSIFICATION, MegaClassifierConfig),
}
# Released options that change nothing, since they print, belong to other layers than Mega's, or say what the tensors
# say; that only the task has; or that have one value.
NOT_OF_MODELS = {
    "mega": set(),
    "mega_lm": {"report_ema_alpha", "write_out_alpha"},  # `mega-fairseq inspect` writes them
    "mega_classifier": {
        *("apply_bert_init", "layer_type", "use_p", "sent_loss", "encoder_learned_pos", "sentence_class_num"),
        *("share_encoder_input_output_embed", "no_token_positional_embeddings", "no_scale_embedding"),
        *("encoder_projection_length", "encoder_projected_attention_heads", "decoder_projected_attention_heads"),
        *("quant_noise_pq", "quant_noise_pq_block_size", "quant_noise_scalar"),
        *("input_type", "classifier_activation_fn"),
    },
}
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
    assert set(options) - set(ours) == NOT_OF_MODELS[name]
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
    archs = released_options(name)["arch_defaults"]
    assert set(family.archs) == set(archs)
    for arch, given in archs.items():
        assert family_of({"arch": arch}) is family
        options = {**OF_THE_COMMAND, **given}
        cfg = configuration(options, family, {})
        for option in {field.name for field in dataclasses.fields(config)} - {"truncation_length"}:
            value = options.get(family.names.get(option, option), cfg.model[option])
            assert cfg.model[option] == family.values.get(option, {}).get(value, value)
        if family is TRANSLATION:
            assert cfg.task.left_pad_source is False


# -------------------------------------------------------------------------------------- fairseq commands


@pytest.fixture(scope="module")
def binarised(tmp_path_factory, data):
    """Eight binarised sentences for each split."""
    folder = tmp_path_factory.mktemp("text")
    for language in ("de", "en"):
        lines = [" ".join(f"w{(i * j) % 36}" for j in range(1, 4 + i)) for i in range(8)]
        (folder / f"text.{language}").write_text("\n".join(lines) + "\n")
    prefixes = [f"--{split}pref={folder / 'text'}" for split in ("train", "valid", "test")]
    dictionaries = [f"--srcdict={data / 'dict.de.txt'}", f"--tgtdict={data / 'dict.en.txt'}"]
    fairseq("preprocess", "-s", "de", "-t", "en", *prefixes, *dictionaries, "--destdir", folder / "bin")
    return folder / "bin"


@pytest.mark.slow
def test_fairseq_train_starts_from_a_converted_model(converted, binarised, tmp_path):
    case = model(PRE)
    sizes = [
        f"--{name.replace('_', '-')}={value}"
        for name, value in case.config.items()
        if name.startswith(("encoder_", "decoder_")) and isinstance(value, int) and name != "decoder_input_dim"
    ]
    said = fairseq(
        "train", binarised, *PLUGIN, "--restore-file", converted(case), "--arch=mega_transformer", *sizes,
        "--normalize-before", "--rel-pos-bias=rotary", "--max-source-positions=64", "--max-target-positions=64",
        "--truncation-length=1024", "--decoder-truncation-length=0", "--dropout=0", "--optimizer=adam", "--lr=0",
        "--max-update=1", "--max-tokens=400", "--required-batch-size-multiple=1", "--cpu", "--save-dir", tmp_path,
    )  # fmt: skip
    assert "Loaded checkpoint" in said
    before, after = state(converted(case))["model"], state(tmp_path / "checkpoint_last.pt")
    assert after["optimizer_history"][-1]["num_updates"] == 1
    assert set(after["model"]) == set(before)
    for name, tensor in before.items():  # the learning rate is 0
        assert torch.equal(after["model"][name], tensor)
    assert "valid on 'valid' subset" in said
