"""Classifiers of tokens, pairs of documents and real values through fairseq's command lines, and their predictions."""

import functools
import shutil

import numpy as np
import pytest
import torch

from mega_fairseq.models import MegaClassifier
from tests.helpers.classifiers import (
    EXAMPLES,
    LABELS,
    OPTIONS,
    SIZES,
    TASK,
    UPDATES,
    WITHIN_EPOCH,
    task_of,
    words_of,
)
from tests.helpers.commands import (
    as_words,
    checkpoint,
    failure,
    fairseq,
    losses,
    records,
)

pytestmark = pytest.mark.slow


def validated(folder, path, *words, task=TASK):
    words = [*task, "--log-format=json", f"--path={path}", *words]
    return records(fairseq("validate", folder, *words), "valid")[-1]


@pytest.mark.parametrize("kind", OPTIONS)
def test_training_learns_the_labels_and_fairseq_validate_repeats_its_validation(kind, classifiers):
    trained = classifiers(kind)
    curve, expected = losses(trained.said), records(trained.said, "valid")[-1]
    assert len(curve) == UPDATES
    assert sum(curve[-10:]) < 6  # bits; 10 without learning
    assert expected["valid_accuracy"] > 80
    found = validated(trained.data, trained.last, "--batch-size=7", task=task_of(trained.kind))
    for name in ("valid_loss", "valid_accuracy"):
        assert found[name] == pytest.approx(expected[name], abs=1e-3)


def test_a_training_resumed_within_an_epoch_ends_with_exactly_the_same_model(classifiers, tmp_path):
    """With the running statistics of batch norm."""
    trained = classifiers("values")
    start = {"restore_file": trained.folder / f"checkpoint_1_{WITHIN_EPOCH}.pt", "save_dir": tmp_path}
    said = fairseq("train", trained.data, *words_of("values", **start, max_update=UPDATES))
    assert losses(said) == losses(trained.said)[WITHIN_EPOCH:]
    first, resumed = checkpoint(trained.last), checkpoint(tmp_path / "checkpoint_last.pt")
    torch.testing.assert_close(resumed["model"], first["model"], rtol=0, atol=0)
    expected = {"classes": list(LABELS), "symbols": None, "number_type": "uint8", "length": 17}
    assert resumed["task_state"] == first["task_state"] == expected


def test_a_training_is_not_resumed_with_other_options_of_its_inputs(classifiers, tmp_path):
    trained = classifiers("values")
    words = words_of("values", restore_file=trained.last, save_dir=tmp_path, values_mean=0.1)
    assert "--values-mean is 0.1 and was 0.5" in failure("train", trained.data, *words)


def test_a_training_is_not_resumed_with_classes_in_another_order_and_a_new_one_warns(classifiers, tmp_path):
    trained = classifiers("values")
    shutil.copytree(trained.data, tmp_path / "data")
    (tmp_path / "data/labels.txt").write_text("\n".join(reversed(LABELS)))
    start = {"restore_file": trained.last, "save_dir": tmp_path / "model", "max_update": UPDATES + 1}
    assert "other classes" in failure("train", tmp_path / "data", *words_of("values", **start))
    start = {"finetune_from_model": trained.last, "save_dir": tmp_path / "model", "max_update": 1}
    assert "with other classes" in fairseq("train", tmp_path / "data", *words_of("values", **start))


def test_a_head_never_starts_anew_in_an_evaluation(classifiers, edited):
    trained = classifiers("tokens")
    path = edited(trained.last, lambda content: content["cfg"]["checkpoint"].update(finetune_from_model="x"))
    words = [*task_of("tokens"), "--num-classes=3", "--batch-size=8", f"--path={path}"]
    assert "sentence_classification_head cannot be loaded" in failure("validate", trained.data, *words)


def test_fairseqs_task_joins_pairs(classifiers, tmp_path):
    trained = classifiers("tokens")
    shutil.copytree(trained.data, tmp_path / "pairs")
    shutil.copytree(trained.data / "input0", tmp_path / "pairs/input1")
    joined = {"init_token": 0, "separator_token": 2, "max_positions": 50, "max_update": 1}
    said = fairseq("train", tmp_path / "pairs", *words_of("tokens", **joined, save_dir=tmp_path))
    found, single = (records(output, "train_inner")[0] for output in (said, trained.said))
    assert found["wpb"] == 2 * (single["wpb"] + single["bsz"])  # <s> a </s> </s> b </s>, and a </s> alone
    for words in (("classify", tmp_path / "pairs", "--cpu"), ("classify", "-", "--cpu"), ("export", tmp_path / "out")):
        assert "--pairs" in failure("mega-fairseq", words[0], tmp_path / "checkpoint_last.pt", *words[1:])


def test_a_model_of_numbers_is_no_classifier(classifiers, edited):
    trained = classifiers("tokens")
    path = edited(trained.last, lambda content: content["cfg"]["task"].update(regression_target=True))
    assert "--regression-target" in failure("mega-fairseq", "classify", path, trained.data, "--cpu")


def test_fairseqs_roberta_trains_with_the_same_task(tmp_path):
    for split in EXAMPLES:
        (tmp_path / f"{split}.input").write_text("aaab\nb\n")
        (tmp_path / f"{split}.label").write_text("a\nb\n")
    sizes = {**SIZES, "encoder_attention_heads": 2, "max_positions": 20, "init_token": 0, "max_update": 1}
    given = {"arch": "roberta", "input_kind": "bytes", "batch_size": 2, "optimizer": "adam", "lr": 0.01, **sizes}
    said = fairseq("train", tmp_path, *TASK, *as_words({**given, "save_dir": tmp_path, "log_format": "json"}))
    assert records(said, "valid")[-1]["valid_loss"] > 0


@functools.lru_cache(maxsize=None)
def predictor(path, kind, data):
    """The model; only fairseq's task, for tokens, needs its data."""
    options = {"data_name_or_path": str(data)} if kind == "tokens" else {}
    return MegaClassifier.from_pretrained(str(path.parent), path.name, **options)


def test_values_of_another_length_than_in_the_training_are_predicted_with_a_warning(classifiers, caplog):
    trained = classifiers("values")
    classifier, rows = predictor(trained.last, "values", trained.data), np.load(trained.data / "valid.npy")

    def warnings():
        return [record.message for record in caplog.records if record.levelname == "WARNING"]

    classifier.predict(rows[:2])
    assert not warnings()
    classifier.predict([*rows[:2], rows[2][1:]])
    (message,) = warnings()
    assert "1 of 3 inputs" in message


@pytest.mark.parametrize(
    ("kind", "inputs", "said"),
    [
        ("bytes", ["ae"], "pairs"),
        ("bytes", [("ae", "b"), ("ae", "b", "c")], "pairs"),
        ("bytes", "ae", "a list of inputs"),
        ("bytes", [("ae", 5)], "part 2 of input 1 .* int"),
        ("tokens", [b"a"], "input 1 .* bytes"),
        ("bytes", [("ae", "b"), ("ae", "")], "part 2 of input 2 is empty"),
        ("bytes", [("ae" * 20, "b")], "more than 20 positions"),
        ("values", [[1, 2, 3]], "input 1 .* int64"),
        ("values", [np.zeros(0)], "input 1"),
        ("values", [np.zeros(3)], "input 1 .* uint8"),
        ("values", [np.ma.masked_array([1, 2], [0, 1])], "masked array"),
        ("values", [[0.5, np.nan]], "input 1 .* finite"),
    ],
)
def test_inputs_that_a_model_does_not_take_are_refused(classifiers, kind, inputs, said):
    trained = classifiers(kind)
    classifier = predictor(trained.last, kind, trained.data)
    assert classifier.predict([]) == []
    with pytest.raises(ValueError, match="batch_size is -1"):
        classifier.predict([], batch_size=-1)
    with pytest.raises((TypeError, ValueError), match=said):
        classifier.predict(inputs)
