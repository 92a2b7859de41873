"""`mega-fairseq classify` prints what the model predicts, in any batches, and compares it with the labels."""

import argparse
import io
import json
import re
import shutil
import sys

import numpy as np
import pytest
import torch

from mega_fairseq.cli.classify import Scores
from mega_fairseq.data.words import warned
from tests.helpers.classifiers import LABELS, OPTIONS
from tests.helpers.commands import records, refused_by

pytestmark = pytest.mark.slow


@pytest.fixture(params=OPTIONS)
def trained(request, classifiers):
    return classifiers(request.param)


@pytest.fixture
def classify(cli, monkeypatch):
    """Runs the command with these bytes as its input; returns exit code, stdout, stderr."""

    def call(model, data, *options, typed=b""):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(typed)))
        return cli("classify", model, data, "--cpu", *options)

    return call


def lines_of(trained, split="valid"):
    """The inputs of a split as lines of standard input."""
    if trained.kind == "values":
        return "".join(" ".join(map(str, row)) + "\n" for row in np.load(trained.data / f"{split}.npy")).encode()
    if trained.kind == "tokens":
        return (trained.data / f"{split}.input").read_bytes()
    columns = [(trained.data / f"{split}.{name}").read_text().split() for name in ("input", "input1")]
    return "".join("\t".join(pair) + "\n" for pair in zip(*columns)).encode()


def parsed(said):
    return [(label, float(probability)) for label, probability in (line.split("\t") for line in said.splitlines())]


def assert_same(found, expected):
    assert [label for label, _ in found] == [label for label, _ in expected]
    assert [p for _, p in found] == pytest.approx([p for _, p in expected], abs=1.1e-4)  # four decimals


def test_a_split_is_classified_like_its_lines_in_any_batches(trained, classify):
    code, said, summary = classify(trained.last, trained.data, "--subset=valid")
    assert code == 0
    expected = records(trained.said, "valid")[-1]
    labels = (trained.data / "valid.label").read_text().split()
    found = parsed(said)
    right = sum(label == predicted for label, (predicted, _) in zip(labels, found)) / len(labels)
    assert 100 * right == pytest.approx(expected["valid_accuracy"], abs=0.1)
    assert f"accuracy {right:.1%} of 37 examples (standard error" in summary
    assert float(re.search(r"loss ([\d.]+) bits", summary)[1]) == pytest.approx(expected["valid_loss"], abs=1.1e-3)
    code, said, _ = classify(trained.last, "-", "--batch-size=7", typed=lines_of(trained))
    assert code == 0
    assert_same(parsed(said), found)


def test_out_writes_the_confusion_and_a_figure(classifiers, classify, tmp_path):
    image = pytest.importorskip("matplotlib.image")
    trained = classifiers("values")
    code, said, summary = classify(trained.last, trained.data, "--subset=valid", f"--out={tmp_path}/found")
    assert code == 0
    assert f"wrote {tmp_path}/found.json, {tmp_path}/found.png" in summary
    numbers = json.loads((tmp_path / "found.json").read_text())
    labels = (trained.data / "valid.label").read_text().split()
    pairs, classes = list(zip(labels, (label for label, _ in parsed(said)))), numbers["classes"]
    assert sorted(classes) == sorted(LABELS)
    assert numbers["confusion"] == [[pairs.count((label, guess)) for guess in classes] for label in classes]
    assert numbers["accuracy"] == np.mean([label == guess for label, guess in pairs])
    picture = image.imread(tmp_path / "found.png")
    assert picture.min() < 0.5
    assert all(edge.min() == 1 for edge in (picture[0], picture[-1], picture[:, 0], picture[:, -1])), "cut off"


def test_a_split_without_labels_is_classified_too(classifiers, classify, tmp_path):
    trained = classifiers("values")
    (tmp_path / "new.npy").write_bytes((trained.data / "valid.npy").read_bytes())
    code, said, summary = classify(trained.last, tmp_path, "--subset=new")
    assert (code, summary) == (0, "")
    assert_same(parsed(said), parsed(classify(trained.last, trained.data, "--subset=valid")[1]))


def test_inputs_that_are_cut_are_counted(classifiers, classify, edited, tmp_path):
    trained = classifiers("values")
    path = edited(trained.last, lambda content: content["cfg"]["task"].update(shorten_method="truncate"))
    rows = np.arange(60, dtype=np.uint8).reshape(3, 20)
    np.save(tmp_path / "new.npy", np.pad(rows, ((0, 0), (0, 1))))
    code, said, told = classify(path, tmp_path, "--subset=new")
    assert code == 0
    assert told.startswith("3 of 3 inputs ")
    assert told.endswith("than the 17 of training examples: 3 inputs\n")
    lines = [" ".join(map(str, row)) for row in rows]
    code, typed, told = classify(path, "-", typed=f"{lines[0]} 0\n{lines[1]} 0\n{lines[2]}\n".encode())
    assert (code, told.endswith("2 lines\n")) == (0, True)
    assert_same(parsed(typed), parsed(said))


def test_lines_of_another_length_than_in_the_training_are_counted(classifiers, classify):
    trained = classifiers("values")
    line = lines_of(trained).splitlines(keepends=True)[0]
    code, said, told = classify(trained.last, "-", typed=line + b"1 2 3\n" + line + b"0 " + line)
    assert (code, said.count("\n")) == (0, 4)
    before, after = told.splitlines()
    assert before == "line 2 does not have 17 numbers as in the training, so its class is a guess"
    assert after == "more or fewer numbers than the 17 of training examples: 2 inputs"
    assert classify(trained.last, "-", typed=line)[2] == ""


def test_scores_of_known_predictions():
    probabilities = torch.tensor([[0.5, 0.25, 0.25], [0.125, 0.75, 0.125], [0.25, 0.25, 0.5], [0.5, 0.25, 0.25]])
    scores = Scores(["a", "b", "c"], torch.tensor([0, 1, 0, 0]), probabilities)
    assert scores.accuracy == 0.75
    assert scores.confusion.tolist() == [[2, 0, 1], [0, 1, 0], [0, 0, 0]]
    assert scores.numbers()["bits"] == pytest.approx((1 + np.log2(4 / 3) + 2 + 1) / 4)
    assert "accuracy 75.0% of 4 examples (standard error 21.7%; the most frequent class has 75.0%)" in scores.summary()


@pytest.mark.parametrize(
    ("data", "options", "typed", "words"),
    [
        ("nowhere", [], b"", ["nowhere"]),
        ("{data}", ["--subset=other"], b"", ["other.npy"]),
        ("{data}", ["--batch-size=0"], b"", ["--batch-size is 0"]),
        ("-", ["--out=x"], b"", ["--out"]),
        ("-", [], b"1 " * 17 + b"\n1 x\n", ["line 2", "number"]),
        ("-", [], b"1 256\n", ["line 1", "from 0 to 255"]),
        ("-", [], b"1 " * 21, ["line 1", "more than 20 positions"]),
    ],
)
def test_bad_inputs_are_refused_in_one_sentence(classifiers, classify, data, options, typed, words):
    trained = classifiers("values")
    code, _, err = classify(trained.last, data.format(data=trained.data), *options, typed=typed)
    assert (code, err.count("\n")) == (1, 1)
    assert not [word for word in words if word not in err], err


def test_text_and_dictionaries_that_cannot_be_read_are_refused_in_one_sentence(classifiers, classify, tmp_path):
    trained = classifiers("tokens")
    refused_by("classify", classify(trained.last, "-", typed=b"\xff\n"), "line 1", "UTF-8")
    shutil.copytree(trained.data, tmp_path / "data")
    for place, word in (("label", "names"), ("input0", "types")):
        (tmp_path / f"data/{place}/dict.txt").write_text(f"{word}\n")
        refused_by("classify", classify(trained.last, tmp_path / "data"), f"data/{place}/dict.txt")


def test_text_that_the_model_cannot_read_gives_a_warning(classifiers, classify, caplog):
    warned.clear()
    first, _ = lines_of(classifiers("tokens")).split(b"\n", 1)
    assert classify(classifiers("tokens").last, "-", typed=first + b"\nForeign words\nOther words\n")[0] == 0
    (message,) = caplog.messages
    assert message.startswith("most words of an input are unknown (<unk>), ")


def test_the_lines_before_a_bad_one_are_classified(classifiers, classify):
    trained = classifiers("values")
    good = lines_of(trained).splitlines(keepends=True)[:3]
    _, expected, _ = classify(trained.last, "-", typed=b"".join(good))
    for bad in (b"\n", b"x\n"):
        code, said, err = classify(trained.last, "-", typed=b"".join([*good, bad, *good]))
        assert (code, said) == (1, expected)
        assert "line 4" in err


def test_a_checkpoint_without_the_names_of_its_classes_needs_its_data(classifiers, classify, edited):
    trained = classifiers("values")
    path = edited(trained.last, lambda content: content.update(task_state={}))
    assert classify(path, trained.data, "--subset=valid")[0] == 0
    code, _, said = classify(path, "-", typed=lines_of(trained))
    assert code == 0  # from the folder of its training, which the checkpoint names
    moved = edited(path, lambda content: content["cfg"]["task"].update(data="moved"))
    code, _, said = classify(moved, "-", typed=lines_of(trained))
    assert code == 1
    assert "no names of classes" in said


def test_a_checkpoint_with_a_value_of_a_wrong_type_is_refused(classifiers, classify, edited):
    path = edited(classifiers("values").last, lambda content: content["cfg"]["task"].update(values_mean=None))
    refused_by("classify", classify(path, "-", typed=b"0.5 0.1"), path, "wrong type")


def test_a_checkpoint_that_does_not_fit_its_data_is_refused(classifiers, classify, edited):
    tokens, values = classifiers("tokens"), classifiers("values")
    head = "classification_heads.sentence_classification_head.out.weight"
    path = edited(tokens.last, lambda content: content["model"].update({head: content["model"][head].repeat(2, 1)}))
    refused_by("classify", classify(path, tokens.data, "--subset=valid"), path, "4 classes", "DATA")
    path = edited(tokens.last, lambda content: content["model"].update({head + "s": torch.ones(1)}))
    refused_by("classify", classify(path, tokens.data, "--subset=valid"), path, "damaged")
    path = edited(values.last, lambda content: content["cfg"]["task"].update(input_kind="tokens"))
    refused_by("classify", classify(path, tokens.data, "--subset=valid"), path, "types of tokens", "DATA")
    headless = {name: tensor for name, tensor in torch.load(values.last)["model"].items() if "heads" not in name}
    path = edited(values.last, lambda content: content.update(model=headless))
    refused_by("classify", classify(path, values.data, "--subset=valid"), path, "0 classification heads")


def test_a_model_of_another_task_is_refused(classifiers, classify, edited):
    task = argparse.Namespace(_name="sentence_ranking")
    path = edited(classifiers("values").last, lambda content: content["cfg"].update(task=task))
    code, _, said = classify(path, "-")
    assert code == 1
    assert "--task sentence_ranking" in said


def test_probabilities_that_are_nan_are_refused_by_number(classifiers, classify, edited):
    def diverge(content):
        for name, tensor in content["model"].items():
            if name.endswith("out.weight"):
                tensor.fill_(torch.nan)

    trained = classifiers("values")
    path = edited(trained.last, diverge)
    code, said, err = classify(path, trained.data, "--subset=valid")
    assert (code, said) == (1, "")
    assert re.search(r"example \d+ .*NaN", err)
