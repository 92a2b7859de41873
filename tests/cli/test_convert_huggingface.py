"""`mega-fairseq convert` for folders of Hugging Face's Mega: recorded outputs and gradients, both directions, refusals.

The cases are folders of `save_pretrained` with the outputs of transformers 4.40.2.
"""

import functools
import json
import math
import shutil
import struct
import sys

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.nn.functional as F

from mega_fairseq.cli.checkpoint import trained
from mega_fairseq.cli.checkpoint.build import empty_model, fill
from mega_fairseq.cli.convert import command, huggingface
from mega_fairseq.cli.main import main
from mega_fairseq.tasks.mega_classification import HEAD
from tests.helpers import golden_cases as golden
from tests.helpers.golden_checks import assert_outputs
from tests.helpers.golden_models import dictionary
from tests.helpers.released import load
from tests.helpers.small_models import encoder, language_model

PAD = 1
FOLDERS = {path.parent.name: path.parent for path in golden.paths() if golden.kind_of(path) == "huggingface"}
each = pytest.mark.parametrize("name", FOLDERS)
PLAIN, POSTNORM, CAUSAL, CLASSES, POOLED = (
    *("mlm_defaults", "mlm_chunk4_laplace_simple_postnorm_rightpad", "clm_chunk4_laplace_rotary_rightpad"),
    *("cls_softmax_layernorm_rightpad", "model_relu2_rotary_pooler_rightpad"),
)


def options_of(folder):
    return json.loads((folder / "config.json").read_text())


def arrays(name, group):
    """The recorded arrays of a group, such as "in" or "grad"."""
    with np.load(FOLDERS[name] / "case.npz") as file:
        return {key[len(group) + 1 :]: torch.tensor(file[key]) for key in file.files if key.startswith(f"{group}/")}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A function that makes a data folder with dictionaries of this many types; <mask> is the last one."""

    @functools.lru_cache(maxsize=None)
    def make(types):
        folder = tmp_path_factory.mktemp("data")
        for part in ("input0", "label"):
            (folder / part).mkdir()
        words = dictionary(types - 1)
        words.add_symbol("<mask>")
        for place in (folder, folder / "input0"):
            words.save(str(place / "dict.txt"))
        (folder / "label" / "dict.txt").write_text("0 1\n1 1\n2 1\n")
        return folder

    return make


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """A function that converts a case once and returns the path of the checkpoint."""
    folder = tmp_path_factory.mktemp("converted")

    @functools.lru_cache(maxsize=None)
    def convert(name):
        assert main(["convert", str(FOLDERS[name]), str(folder / f"{name}.pt")]) == 0
        return folder / f"{name}.pt"

    return convert


@pytest.fixture
def model(converted, data):
    """A function that loads a converted case with fairseq."""
    return lambda name: load(converted(name), data(options_of(FOLDERS[name])["vocab_size"]))[0]


def run(model, arch, tokens, types=None):
    """The recorded outputs of a class by name."""
    if arch == "MegaForCausalLM":
        return {"logits": model(tokens)[0]}
    kinds = {} if types is None else {"token_types": types}
    if arch == "MegaForSequenceClassification":
        return {"logits": model(tokens, classification_head_name=HEAD, **kinds)[0]}
    if arch == "MegaForMaskedLM":
        return {"logits": model(tokens, **kinds)[0]}
    pooled = model(tokens, classification_head_name=huggingface.POOLER, **kinds)[0]
    return {"last_hidden_state": model(tokens, features_only=True, **kinds)[0], "pooler_output": pooled}


def hidden_states(model, tokens, types, names):
    """By name; decoders only return the last one."""
    if hasattr(model, "decoder"):
        return {names[-1]: model(tokens, features_only=True)[0]}
    kinds = {} if types is None else {"token_types": types}
    _, extra = model(tokens, features_only=True, return_all_hiddens=True, **kinds)
    assert len(names) == len(extra["inner_states"])
    return dict(zip(names, (state.transpose(0, 1) for state in extra["inner_states"])))


def loss_of(arch, outputs, given):
    if arch == "MegaModel":
        return sum(
            (outputs[name] * given[cotangent]).sum()
            for name, cotangent in (("last_hidden_state", "cotangent"), ("pooler_output", "cotangent_pooler"))
        )
    logits, labels = outputs["logits"], given["labels"]
    if arch == "MegaForCausalLM":
        logits, labels = logits[:, :-1], labels[:, 1:]
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten())


# -------------------------------------------------------------------------------------- numbers


@each
def test_outputs_hidden_states_loss_and_gradients_are_those_of_transformers(name, model):
    options, given, expected = options_of(FOLDERS[name]), arrays(name, "in"), arrays(name, "out")
    arch, ours, real = options["architectures"][0], model(name), given["attention_mask"].bool()
    tokens = given["input_ids"].masked_fill(~real, PAD)
    outputs = run(ours, arch, tokens, given.get("token_type_ids"))
    names = sorted(output for output in expected if output.startswith("hidden_"))
    states = hidden_states(ours, tokens, given.get("token_type_ids"), names)
    for output, y in {**outputs, **states}.items():
        rows = real if y.dim() == 3 else slice(None)
        assert_outputs(y[rows], expected[output][rows], output)
        assert y.dim() < 3 or not y[~real].any() or output == "logits"
    loss = loss_of(arch, outputs, given)
    assert_outputs(loss, expected["loss"], "loss", 1e-5 * max(1.0, abs(float(expected["loss"]))))
    loss.backward()
    parameters = dict(ours.named_parameters())
    family, recorded = huggingface.HuggingFace(options), arrays(name, "grad")
    gradients = family.tensors({**huggingface.DEFAULTS, **options}, recorded)
    compared = [key for key in gradients if f"{huggingface.POOLER}.out_proj" not in key]
    assert len(compared) >= len(recorded)
    for key in compared:
        gradient = parameters[key].grad.clone()
        assert_outputs(gradient, gradients[key], f"gradient of {key}")


@each
@torch.no_grad()
def test_a_converted_model_gives_the_same_alone_and_with_pads(name, model):
    given, expected, ours = arrays(name, "in"), arrays(name, "out"), model(name)
    arch = options_of(FOLDERS[name])["architectures"][0]
    for row, real in enumerate(given["attention_mask"].bool()):
        tokens, types = given["input_ids"][row][real], given.get("token_type_ids")
        if not len(tokens):
            continue
        kinds = None if types is None else types[row][real][None]
        y = next(iter(run(ours, arch, tokens[None], kinds).values()))[0]
        together = expected["logits" if "logits" in expected else "last_hidden_state"][row]
        assert_outputs(y, together[real] if y.dim() == 2 else together, f"sentence {row}")
        if f"alone_{row}" in expected:
            assert_outputs(y, expected[f"alone_{row}"], f"sentence {row} alone")


# -------------------------------------------------------------------------------------- both directions


@each
def test_a_folder_that_is_written_back_has_the_same_tensors_and_options(name, converted, tmp_path):
    assert main(["convert", "--to-huggingface", str(converted(name)), str(tmp_path / "back")]) == 0
    before, after = (huggingface.read(str(folder)) for folder in (FOLDERS[name], tmp_path / "back"))
    tied = before[0]["tie_word_embeddings"] and options_of(FOLDERS[name])["architectures"][0].endswith("LM")
    heads = {"mlm_head.weight", "lm_head.weight"} if tied else set()  # a .bin has the tied matrix twice
    assert before[1].keys() - heads == after[1].keys()
    for key, tensor in after[1].items():
        expected = before[1][key]
        assert (tensor.dtype, tensor.shape) == (expected.dtype, expected.shape), key
        if key.endswith("rel_pos_bias.rel_pos_bias"):  # the rest of the table is never read
            read = 2 * (before[0]["chunk_size"] if before[0]["chunk_size"] > 0 else before[0]["max_positions"]) - 1
            tensor, expected = tensor[:read], expected[:read]
        assert torch.equal(tensor, expected) or key.endswith("_float_tensor"), key
    idle = {"classifier_dropout"}
    idle |= set() if before[0]["use_normalized_ffn"] else {"nffn_hidden_size", "nffn_activation_dropout_prob"}
    idle |= set() if before[0]["architectures"][0].endswith("LM") else {"add_lm_hidden_dense_layer"}
    for option in huggingface.DEFAULTS.keys() - idle:
        assert after[0][option] == before[0][option], option
    assert main(["convert", str(tmp_path / "back"), str(tmp_path / "again.pt")]) == 0
    first, second = (trained.read(str(path)) for path in (converted(name), tmp_path / "again.pt"))
    assert all(torch.equal(second.tensors[key], tensor) for key, tensor in first.tensors.items())


def test_a_folder_that_is_not_completely_overwritten_has_no_options(converted, tmp_path, monkeypatch):
    words = ["convert", "--to-huggingface", "--force", str(converted(PLAIN)), str(tmp_path / "back")]
    write = command.write
    assert main(words) == 0

    def full(path, content):
        if path.endswith(huggingface.SAFE):
            raise huggingface.UserError(f"{path} was not written")
        write(path, content)

    monkeypatch.setattr(command, "write", full)
    assert main(words) == 1
    assert [path.name for path in (tmp_path / "back").iterdir()] == [huggingface.SAFE]


def test_names_of_classes_are_kept(tmp_path, cli):
    shutil.copytree(FOLDERS[CLASSES], tmp_path / "named")
    names = {"0": "neutral", "1": "good", "2": "bad"}
    (tmp_path / "named" / "config.json").write_text(json.dumps({**options_of(FOLDERS[CLASSES]), "id2label": names}))
    code, said, _ = cli("convert", tmp_path / "named", tmp_path / "ours.pt")
    assert code == 0
    for words in ("neutral, good, bad", "--task=sentence_prediction", "--num-classes=3 --init-token=0"):
        assert words in said
    assert main(["convert", "--to-huggingface", str(tmp_path / "ours.pt"), str(tmp_path / "back")]) == 0
    assert options_of(tmp_path / "back")["id2label"] == names


def test_labels_name_the_classes_only_of_models_without_names(tmp_path, refuses, cli):
    words, options = tmp_path / "dict.txt", ("--labels", str(tmp_path / "dict.txt"))
    words.write_text("a 1\nb 1\nc 1\n")
    assert main(["convert", str(FOLDERS[CLASSES]), str(tmp_path / "ours.pt"), *options]) == 0
    assert trained.read(str(tmp_path / "ours.pt")).task_state["classes"] == ["a", "b", "c"]
    named = folder_with(tmp_path, CLASSES, id2label={"0": "x", "1": "y", "2": "z"})
    refuses("convert", named, tmp_path / "no.pt", *options, words=["--labels"])
    refuses("convert", FOLDERS[PLAIN], tmp_path / "no.pt", *options, words=["--labels"])
    refuses("convert", "--to-huggingface", tmp_path / "ours.pt", tmp_path / "no", *options, words=["--labels"])
    unnamed = tmp_path / "unnamed.pt"
    assert main(["convert", str(FOLDERS[CLASSES]), str(unnamed)]) == 0
    code, said, _ = cli("convert", "--to-huggingface", unnamed, tmp_path / "numbers")
    assert (code, "LABEL_0, LABEL_1, LABEL_2: --labels" in said) == (0, True)
    assert main(["convert", "--to-huggingface", str(unnamed), str(tmp_path / "back"), *options]) == 0
    assert options_of(tmp_path / "back")["id2label"] == {"0": "a", "1": "b", "2": "c"}
    words.write_text("a 1\n")
    refuses("convert", FOLDERS[CLASSES], tmp_path / "no.pt", *options, words=["--labels names 1"])


def test_tied_matrices_that_differ_become_the_heads(tmp_path, cli):
    """transformers loads the embeddings first and the head into the same parameter."""
    tensors = safetensors.torch.load_file(str(FOLDERS[PLAIN] / "model.safetensors"))
    head = torch.randn_like(tensors["mega.embedding_layer.word_embeddings.weight"])
    torch.save({**tensors, "mlm_head.weight": head}, tmp_path / "pytorch_model.bin")
    shutil.copy(FOLDERS[PLAIN] / "config.json", tmp_path)
    code, said, _ = cli("convert", tmp_path, tmp_path / "ours.pt")
    assert (code, "differ" in said) == (0, True)
    ours = trained.read(str(tmp_path / "ours.pt")).tensors
    assert torch.equal(ours["encoder.embed_tokens.weight"], head)
    assert torch.equal(ours["encoder.lm_head.weight"], head)


# -------------------------------------------------------------------------------------- refusals


def folder_with(tmp_path, name=PLAIN, **changes):
    shutil.copytree(FOLDERS[name], tmp_path / "folder")
    path = tmp_path / "folder" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return tmp_path / "folder"


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        (PLAIN, "model_type", "bert"),
        (PLAIN, "architectures", ["MegaForTokenClassification"]),
        (PLAIN, "architectures", "MegaForMaskedLM"),
        (PLAIN, "add_cross_attention", True),
        (PLAIN, "is_decoder", True),
        (CAUSAL, "bidirectional", True),
        (CAUSAL, "normalization_type", "batchnorm"),
        (PLAIN, "activation", "tanh"),
        (PLAIN, "activation", ["silu"]),
        (PLAIN, "truncation", 0),
        (PLAIN, "truncation", 10**30),
        (PLAIN, "use_chunking", True),
        (PLAIN, "hidden_size", "16"),
        (PLAIN, "hidden_size", 17),
        (PLAIN, "num_hidden_layers", 10**9),
        (PLAIN, "vocab_size", 40),
        (PLAIN, "dropout_prob", 10**400),
        (POSTNORM, "chunk_size", 25),
        (CLASSES, "problem_type", "regression"),
        (CLASSES, "id2label", {"0": "a", "1": "b", "3": "c"}),
        (CLASSES, "id2label", {"0": "a", "1": "b", "2": "b"}),
        (CLASSES, "id2label", ["a", 1, None]),
    ],
)
def test_options_without_a_counterpart_are_refused(name, option, value, tmp_path, refuses):
    folder = folder_with(tmp_path, name, **{option: value})
    known = option if option not in ("use_chunking", "hidden_size", "num_hidden_layers", "dropout_prob") else ""
    known = "Mega" if option == "model_type" else "position_bias" if value == 25 else known
    refuses("convert", folder, tmp_path / "ours.pt", words=[folder, known])


HEADER = {"a": {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 4]}}
HOSTILE = {
    "empty": b"",
    "a header longer than the file": struct.pack("<Q", 2**60) + b"{}",
    "nested too deep": struct.pack("<Q", 200_000) + b"[" * 200_000,
    "a huge shape": struct.pack("<Q", len(json.dumps(HEADER))) + json.dumps(HEADER).encode() + b"1234",
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_and_damaged_safetensors_are_refused(what, tmp_path, refuses):
    folder = folder_with(tmp_path)
    (folder / "model.safetensors").write_bytes(HOSTILE[what])
    refuses("convert", folder, tmp_path / "ours.pt", words=["damaged or incomplete"])


def changed(tensors, what):
    embedding = "mega.embedding_layer.word_embeddings.weight"
    if what == "NaN":
        return {**tensors, embedding: torch.full((41, 16), math.nan)}
    if what == "a tensor too many":
        return {**tensors, "mega.extra": torch.ones(1)}
    if what == "a tensor with no number":
        return {**tensors, embedding: torch.ones(0, 16)}
    return {name: tensor for name, tensor in tensors.items() if what not in name}


@pytest.mark.parametrize(
    "what", ["NaN", "a tensor too many", "a tensor with no number", "mx_proj.weight", "out_proj.weight"]
)
def test_tensors_that_do_not_fit_are_refused(what, tmp_path, refuses):
    folder = folder_with(tmp_path, CLASSES)
    tensors = safetensors.torch.load_file(str(folder / "model.safetensors"))
    (folder / "model.safetensors").write_bytes(safetensors.torch.save(changed(tensors, what)))
    refuses("convert", folder, tmp_path / "ours.pt", words=[folder])


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.complex64])
def test_safetensors_of_other_types_are_refused(dtype, tmp_path, refuses):
    folder = folder_with(tmp_path)
    tensors = {"mega.extra": torch.ones(3).to(dtype)}
    (folder / "model.safetensors").write_bytes(safetensors.torch.save(tensors))
    refuses("convert", folder, tmp_path / "ours.pt", words=["mega.extra"])


def test_without_the_package_safetensors_its_installation_is_named(converted, tmp_path, refuses, monkeypatch):
    ours = converted(PLAIN)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    refuses("convert", FOLDERS[PLAIN], tmp_path / "ours.pt", words=["pip install safetensors"])
    refuses("convert", "--to-huggingface", ours, tmp_path / "back", words=["pip install safetensors"])


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("normalization_type", "rmsnorm"),
        ("normalize_before", True),  # with a last norm
        ("lm_head", "gelu"),
        ("rel_pos_bias", "alibi"),
        ("encoder_token_mixer", "gau"),
        ("normalize_embedding", True),
    ],
)
def test_options_that_transformers_does_not_have_are_refused_together(option, value, tmp_path, refuses):
    path = masked(tmp_path, **{"encoder_token_shift": True, option: value})
    name = "no-final-norm" if option == "normalize_before" else option.replace("_", "-")
    refuses("convert", "--to-huggingface", path, tmp_path / "out", words=[path, f"--{name}", "--encoder-token-shift"])


# -------------------------------------------------------------------------------------- models of ours


def saved(made, name, path):
    """A checkpoint of a model whose weights are a sine."""
    with torch.no_grad():
        for number, parameter in enumerate(made.parameters()):
            places = torch.arange(parameter.numel(), dtype=torch.float64) + 100 * number
            parameter.copy_((0.3 * torch.sin(places)).view(parameter.shape))
    cfg = {option: getattr(value, "value", value) for option, value in vars(made.cfg).items()}
    torch.save({"cfg": {"model": {**cfg, "_name": name}}, "model": made.state_dict()}, path)
    return path


def masked(tmp_path, **options):
    """A checkpoint of a mega_encoder without a classification head."""
    small = {"encoder_layers": 2, "lm_head": "tanh", "rel_pos_bias": "rotary", "encoder_chunk_size": 4}
    made = encoder(pooling="mean", **{**small, **options})
    del made.classification_heads["head"]
    return saved(made, "mega_encoder", tmp_path / "trained.pt")


def causal(tmp_path, **options):
    """A checkpoint of a mega_lm without a bias in its output."""
    small = {"decoder_chunk_size": 4, "attention_activation_fn": "laplace", "no_scale_embedding": True, **options}
    made = language_model(no_final_norm=True, **small)
    return saved(made, "mega_lm", tmp_path / "trained.pt")


@pytest.mark.parametrize("trained_on", [False, True])
def test_a_pooler_is_written_as_one_until_it_is_another_head(trained_on, converted, tmp_path):
    content = torch.load(converted(POOLED), weights_only=True)
    if trained_on:
        content["model"][f"classification_heads.{huggingface.POOLER}.out_proj.bias"] += 1.0
    torch.save(content, tmp_path / "ours.pt")
    assert main(["convert", "--to-huggingface", str(tmp_path / "ours.pt"), str(tmp_path / "back")]) == 0
    expected = "MegaForSequenceClassification" if trained_on else "MegaModel"
    assert options_of(tmp_path / "back")["architectures"] == [expected]


# Logits that transformers 4.40.2 (torch 2.13) computes for tokens 4 .. 11 with the folder that is written: those of
# types 4 and 5 at the first and the last position.
RECORDED = {
    "masked": (masked, {}, [-0.0676539, 0.2079650, -0.0685853, 0.2141388]),
    "causal": (causal, {}, [-0.4203249, 0.3627615, -0.2212348, 0.1839707]),
    "plain norms": (masked, {"no_affine_norm": True}, [0.4611692, -0.2665388, 0.4345879, -0.2370916]),
    "no norms": (
        *(causal, {"no_affine_norm": True, "normalization_type": "hf_rmsnorm"}),
        [0.4636567, 0.1643837, 0.4680933, 0.0996108],
    ),
}


@pytest.mark.parametrize("name", RECORDED)
def test_transformers_gives_the_logits_of_a_model_that_was_trained_here(name, tmp_path):
    """And the folder leads back to the same model."""
    make, options, expected = RECORDED[name]
    path = make(tmp_path, **options)
    assert main(["convert", "--to-huggingface", str(path), str(tmp_path / "folder")]) == 0
    assert main(["convert", str(tmp_path / "folder"), str(tmp_path / "back.pt")]) == 0
    for each_path in (path, tmp_path / "back.pt"):
        checkpoint = trained.read(str(each_path))
        with torch.no_grad():
            y = fill(empty_model(checkpoint), checkpoint.tensors).eval()(torch.arange(4, 12)[None])[0][0]
        found = [*y[0, 4:6].tolist(), *y[-1, 4:6].tolist()]
        assert found == pytest.approx(expected, abs=1e-5)
