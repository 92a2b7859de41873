"""`mega-fairseq convert` with classifiers: released logits, options that fairseq loads, and refusals.

The checkpoints are golden models in the format of the released code; test_fork_classifiers.py has
those that the released code saved.
"""

import pytest
import torch

from mega_fairseq.cli.checkpoint.build import empty_model, fill
from mega_fairseq.cli.checkpoint.trained import read
from mega_fairseq.cli.convert.names import HEAD
from tests.helpers import released
from tests.helpers.golden_checks import assert_outputs
from tests.helpers.released import (
    checkpoint,
    convert,
    refuse,
    refuse_content,
    save,
    with_tensors,
    without,
)

pytestmark = pytest.mark.skipif(not released.READS_SAFELY, reason=released.NEEDS_TORCH)
INPUTS = ("src_tokens", "src_lengths", "src_tokens1", "src_lengths1")
TEXT, IMAGE, SPEECH = "listops_full_softmax_layernorm_mp", "image_full_softmax_layernorm_prenorm_mp", "sc_raw"
TYPES, CLASSES = 40, 4


def model(name):
    (found,) = (case for case in released.models("classifier") if name in case.name)
    return found


def each_model():
    return pytest.mark.parametrize("case", released.models("classifier"), ids=lambda case: case.name)


def options(path, section):
    return torch.load(path, weights_only=True)["cfg"][section]


@each_model()
@torch.no_grad()
def test_a_converted_model_computes_the_released_logits(case, converted):
    found = read(str(converted(case)))
    ours = fill(empty_model(found), found.tensors).eval()
    given = {name: case.inputs[name] for name in INPUTS if name in case.inputs}
    logits, _ = ours(**given, classification_head_name=HEAD.rpartition(".")[2])
    assert_outputs(logits, case.outputs["logits"], "logits")


@each_model()
def test_the_task_reads_inputs_as_the_release_does(case, converted):
    task = options(converted(case), "task")
    text, first = case.config["vocabulary"] is not None, case.config["sen_rep_type"] == "cls"
    assert (task["_name"], task["max_positions"]) == ("mega_classification", case.config["max_positions"])
    assert task["input_kind"] == ("tokens" if text else "values")
    assert task["shorten_method"] == ("truncate" if text else "none")
    assert task["init_token"] == (TYPES - 1 if first else None)
    assert options(converted(case), "criterion")["_name"] == "sentence_prediction"


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        (IMAGE, {"pixel_normalization": [0.48, 0.24]}, (0.48, 0.24)),
        (IMAGE, {"pixel_normalization": None}, (0.5, 0.5)),
        (SPEECH, {}, (0.0, 1.0)),
    ],
)
def test_values_are_normalised_as_in_the_release(name, given, expected, tmp_path):
    task = options(convert(checkpoint(model(name), **given), tmp_path), "task")
    assert (task["values_mean"], task["values_deviation"]) == expected


# -------------------------------------------------------------------------------------- names of classes


@pytest.fixture
def labels(tmp_path_factory):
    """A function that writes a dictionary of labels, as fairseq-preprocess does."""

    def write(*names):
        path = tmp_path_factory.mktemp("label-bin") / "dict.txt"
        lines = [f"{name} {9 - i}" for i, name in enumerate(names)] + ["madeupword0000 0", "madeupword0001 0"]
        path.write_text("\n".join(lines) + "\n")
        return path

    return write


def test_names_of_classes_are_stored_in_the_dictionarys_order(labels, tmp_path, capsys):
    names = ["9", "0", "yes", "4"]
    convert(checkpoint(model(TEXT)), tmp_path, options=["--labels", labels(*names)])
    assert "classes in order: 9, 0, yes, 4" in capsys.readouterr().out
    assert torch.load(tmp_path / "ours-released.pt", weights_only=True)["task_state"] == {"classes": names}


def test_without_names_the_summary_says_whose_order_counts(tmp_path, capsys):
    path = convert(checkpoint(model(TEXT)), tmp_path)
    assert "--labels" in capsys.readouterr().out
    assert torch.load(path, weights_only=True)["task_state"] == {}


@pytest.mark.parametrize("name", [IMAGE, SPEECH])
def test_classes_of_images_and_speech_are_the_numbers(name, tmp_path, capsys):
    path = convert(checkpoint(model(name)), tmp_path)
    assert "classes in order: 0, 1, 2, 3" in capsys.readouterr().out
    assert torch.load(path, weights_only=True)["task_state"] == {"classes": ["0", "1", "2", "3"]}


@pytest.mark.parametrize(
    ("name", "names", "content", "words"),
    [
        (TEXT, "abc", None, "--labels names 3"),
        (TEXT, "", b"\xff 1\n", "--labels"),
        (IMAGE, "abcd", None, "--labels"),
    ],
)
def test_labels_that_do_not_fit_are_refused(name, names, content, words, labels, tmp_path, capsys):
    path = labels(*names)
    if content is not None:
        path.write_bytes(content)
    source = save(checkpoint(model(name)), tmp_path / "any.pt")
    refuse(capsys, source, tmp_path / "ours.pt", "--labels", path, words=[words])
    assert [path.name for path in tmp_path.iterdir()] == ["any.pt"]


# -------------------------------------------------------------------------------------- errors


def text(**options):
    return checkpoint(model(TEXT), **options)


def image(**options):
    return checkpoint(model(IMAGE), **options)


HIDDEN, OUT = "classifier.0.0.weight", "sentence_projection_layer.weight"
SECOND = "classification_heads.other."


def second_head():
    shapes = {"hidden.0.weight": (20, 24), "hidden.0.bias": (20,), "out.weight": (2, 20)}
    return {SECOND + name: torch.ones(shape) for name, shape in shapes.items()}


REFUSED = {
    "unknown pooling": (lambda: text(sen_rep_type="max"), "max"),
    "other activation in the head": (lambda: text(classifier_activation_fn="relu"), "'relu'"),
    "normalisation that is filled in later": (
        lambda: image(pixel_normalization=["${oc.env:HOME}", 1.0]),
        "values_mean",
    ),
    "pairs in the options only": (lambda: text(classifier_in_dim=48), "hidden.0.weight"),
    "missing head": (lambda: without(text(), OUT, HIDDEN, HIDDEN.replace("weight", "bias")), "contains 0 heads"),
    "two heads": (lambda: with_tensors(text(), **second_head()), "contains 2 heads"),
    "longer bias than the inputs": (lambda: text(max_positions=47), "position_bias"),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_unsupported_and_damaged_checkpoints_are_refused(reason, tmp_path, capsys):
    make, words = REFUSED[reason]
    refuse_content(make(), words, tmp_path, capsys)
