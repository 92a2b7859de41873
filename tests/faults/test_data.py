"""Tiny or huge data, or another dictionary: every token is used, or an error says why not."""

import re
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.helpers.binarised import write_indexed
from tests.helpers.commands import CPU, LM, PLUGIN, failure, fairseq, perplexity, records, trained

pytestmark = pytest.mark.slow


def words_of(command, data, model, folder):
    """A command of fairseq on this data."""
    words = {
        "train": [*model.words, "--max-epoch=1", "--save-dir", folder],
        "eval-lm": [*LM, "--path", model.last, "--gen-subset=test"],
        "generate": [*CPU, *PLUGIN, "--path", model.last],
    }
    return [command, data, *words[command]]


def evaluated(data, model, *options):
    """Tokens and loss of the test set."""
    return perplexity(fairseq("eval-lm", data, *LM, "--path", model, "--gen-subset=test", *options))[:2]


# ------------------------------------------------------------------------------------------------ another dictionary


def with_types(data, folder, change):
    """Copies the data and adds types to its dictionaries, or removes some."""
    copy = folder / "other"
    shutil.copytree(data, copy)
    for path in copy.glob("dict.*"):
        lines = path.read_text().splitlines(True)
        path.write_text("".join(lines[:change] if change < 0 else [*lines, *(f"more{n} 1\n" for n in range(change))]))
    return copy


@pytest.mark.parametrize(("kind", "command", "change"), [("softmax", "eval-lm", -1), ("translation", "generate", 3)])
def test_a_checkpoint_of_another_dictionary_is_refused(kind, command, change, edited, tmp_path):
    """Also one that does not have its types, like those of fairseq's tasks."""
    model = trained(kind)
    path = edited(model.last, lambda content: content["task_state"].clear())
    old = SimpleNamespace(words=model.words, last=path)
    line = failure(*words_of(command, with_types(model.data, tmp_path, change), old, tmp_path))
    stored, types = re.findall(r"(\d+) types", line)
    assert int(types) - int(stored) == change


def with_types_in_another_order(data, folder):
    copy = with_types(data, folder, 0)
    for path in copy.glob("dict.*"):
        first, second, *rest = path.read_text().splitlines(True)
        path.write_text("".join([second, first, *rest]))
    return copy


def test_a_checkpoint_of_the_same_types_in_another_order_is_refused(bible, trained_on_documents, tmp_path):
    model = trained("softmax")
    other = with_types_in_another_order(model.data, tmp_path)
    assert "has another dictionary than" in failure(*words_of("eval-lm", other, model, tmp_path))
    resumed = ["train", other, *model.words, "--restore-file", model.last, "--save-dir", tmp_path, "--max-update=99"]
    assert "was trained with other types" in failure(*resumed)
    start = ["--finetune-from-model", model.last, "--no-save", "--max-update=1"]
    said = [fairseq("train", data, *model.words, *start) for data in (other, model.data)]
    assert ["with other types" in each for each in said] == [True, False]
    exported = ["mega-fairseq", "export", model.last, tmp_path / "exported", "--data", other]
    assert "has another dictionary than" in failure(*exported)
    other = with_types_in_another_order(bible, tmp_path / "documents")
    words = [*PLUGIN, *CPU, "--task=mega_document_translation", "--path", trained_on_documents / "checkpoint_last.pt"]
    assert "has another dictionary than" in failure("generate", other, *words)


# ------------------------------------------------------------------------------------------------ tiny and huge


def test_documents_of_one_token_are_trained_on_and_evaluated(tmp_path):
    """Empty lines, of one token, are at the start, in the middle and at the end."""
    language_model = trained("softmax")
    text = "\n" + "a b a\n\nb\n\n\n\na\n" * 9 + "\n\n"
    for split in ("train", "test"):
        (tmp_path / split).write_text(text)
    files = [f"--{split}pref={tmp_path / split}" for split in ("train", "test")]
    known = ["--srcdict", language_model.data / "dict.txt", "--destdir", tmp_path / "bin"]
    fairseq("preprocess", "--only-source", *known, *files)
    words = words_of("train", tmp_path / "bin", language_model, tmp_path)
    said = fairseq(*words, "--valid-subset=test", "--documents=line")
    count = len(text.split()) + text.count("\n")
    assert sum(record["wpb"] for record in records(said, "train_inner")) == count
    loss, last = records(said, "test")[-1]["test_loss"], tmp_path / "checkpoint_last.pt"
    found = evaluated(tmp_path / "bin", last, "--documents=line", "--batch-size=1")
    assert found == (count, pytest.approx(loss, abs=1e-4))


def binarise(path, lines, types=20):
    """Writes lines of these lengths; fairseq-preprocess would take a minute for a line of a million words."""
    chance = np.random.default_rng(1)
    write_indexed(path, (torch.from_numpy(np.append(chance.integers(4, types, length - 1), 2)) for length in lines))


def test_a_huge_line_is_trained_on_in_segments_and_evaluated(tmp_path):
    language_model = trained("softmax")
    shutil.copy(language_model.data / "dict.txt", tmp_path)
    trained_on, evaluated_on = 40_000, 100_000
    for split, lines in (("train", [trained_on]), ("valid", [9]), ("test", [3, evaluated_on, 1])):
        binarise(tmp_path / split, lines)
    long = ["--decoder-chunk-size=64", "--variant-block-multiple-min=8", "--variant-block-multiple-max=16"]
    said = fairseq(*words_of("train", tmp_path, language_model, tmp_path), *long, "--max-tokens=8192")
    assert sum(record["wpb"] for record in records(said, "train_inner")) == trained_on
    count, loss = evaluated(tmp_path, tmp_path / "checkpoint_last.pt", "--documents=line")
    assert count == 3 + evaluated_on + 1
    assert loss == pytest.approx(4, abs=0.2)  # sixteen types, equally likely
