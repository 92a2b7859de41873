"""Missing, damaged, tiny or huge data, or another dictionary: every token is used, or an error says why not."""

import io
import random
import re
import shutil
import sys
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fairseq.data.indexed_dataset import MMapIndexedDatasetBuilder

from mega_fairseq.cli.main import main
from tests.helpers.commands import (
    CPU,
    LM,
    LM_HEADS,
    LM_TRAINING,
    MEGA,
    MEGA_LM,
    PLUGIN,
    ROOT,
    SEARCH,
    SIZES,
    TRAINING,
    Running,
    failure,
    fairseq,
    fresh,
    preprocess_pairs,
    preprocess_text,
    records,
    translations,
)

pytestmark = pytest.mark.slow

LANGUAGE_MODEL = [*LM, *MEGA_LM, *LM_HEADS["softmax"], *LM_TRAINING]
TRANSLATION = [*PLUGIN, *MEGA, *TRAINING]
CONTINUE = ["--gen-subset=test", "--documents=line", "--prefix-size=1", "--beam=1", "--max-len-b=90"]


# ------------------------------------------------------------------------------------------------ shared fixtures


def trained(data, folder, words):
    """Trains a model for two updates."""
    fairseq("train", data, *words, "--max-update=2", "--disable-validation", "--save-dir", folder)
    return SimpleNamespace(data=data, words=words, last=folder / "checkpoint_last.pt")


@pytest.fixture(scope="session")
def language_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("language_model")
    return trained(preprocess_text(folder), folder, LANGUAGE_MODEL)


@pytest.fixture(scope="session")
def translation(tmp_path_factory):
    folder = tmp_path_factory.mktemp("translation")
    return trained(preprocess_pairs(folder), folder, TRANSLATION)


def harmed(data, folder, files, harm):
    """Copies the data and removes, empties or truncates these files of the copy."""
    copy = folder / "harmed"
    shutil.copytree(data, copy)
    for path in copy.glob(files):
        content = path.read_bytes()
        if harm == "gone":
            path.unlink()
        else:
            path.write_bytes({"empty": b"", "half": content[: len(content) // 2]}[harm])
    return copy


def call(command, data, model, folder, *options):
    """Runs a command of fairseq on this data; returns its exit code and output."""
    words = {
        "train": [*model.words, "--max-epoch=1", "--save-dir", folder],
        "eval-lm": [*LM, "--path", model.last, "--gen-subset=test"],
        "generate": [*CPU, *PLUGIN, "--path", model.last],
    }[command]
    return Running(command, data, *words, *options).wait()


def sweep(model, data, folder, capsys):
    """Runs a sweep, which must fail, on this data; returns the error message."""
    assert main(["sweep", str(model.last), str(data), "--chunks=8", f"--out={folder / 'out'}", "--cpu"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    return line


def tokens(data, split):
    """The number of tokens in a split of a language model; each has two bytes."""
    return (data / f"{split}.bin").stat().st_size // 2


def evaluated(data, model, *options):
    """Tokens and loss of the test set, as fairseq-eval-lm logs them."""
    said = fairseq("eval-lm", data, *LM, "--path", model, "--gen-subset=test", *options)
    count, loss = re.search(r"Evaluated ([\d,]+) tokens .*Loss \(base 2\): ([\d.]+),", said, re.DOTALL).groups()
    return int(count.replace(",", "")), float(loss)


# ------------------------------------------------------------------------------------------------ missing, damaged


@pytest.mark.parametrize(("command", "split"), [("train", "train"), ("train", "valid"), ("generate", "test")])
def test_a_missing_split_is_reported(language_model, command, split, tmp_path):
    data = harmed(language_model.data, tmp_path, f"{split}.*", "gone")
    code, heard = call(command, data, language_model, tmp_path, *(CONTINUE + LM if command == "generate" else []))
    assert code == 1
    said = "FileNotFoundError: there is no {0}/{1}.bin and {0}/{1}.idx; give the folder that"
    assert heard.splitlines()[-1].startswith(said.format(data, split))


MISMATCH = r"\.bin has [\d,]+ tokens and .*\.idx lists [\d,]+: one of them is damaged; run fairseq-preprocess"
NO_INDEX = r"\.idx is damaged or not fairseq's; run fairseq-preprocess"


@pytest.mark.parametrize(
    ("command", "split", "kind", "harm", "said"),
    [("train", "train", "bin", "half", MISMATCH), ("eval-lm", "test", "idx", "empty", NO_INDEX)],
)
def test_damaged_text_is_refused_in_one_sentence(language_model, command, split, kind, harm, said, tmp_path):
    data = harmed(language_model.data, tmp_path, f"{split}.{kind}", harm)
    code, heard = call(command, data, language_model, tmp_path)
    assert code == 1
    assert re.search(rf"^ValueError: {data}/{split}{said}", heard.splitlines()[-1])


@pytest.mark.parametrize(("kind", "harm", "said"), [("bin", "empty", MISMATCH), ("idx", "half", NO_INDEX)])
def test_a_sweep_refuses_damaged_text(language_model, kind, harm, said, tmp_path, capsys):
    data = harmed(language_model.data, tmp_path, f"test.{kind}", harm)
    assert re.search(rf"^mega-fairseq sweep: {data}/test{said}", sweep(language_model, data, tmp_path, capsys))


@pytest.mark.parametrize(
    ("command", "file", "harm", "said"),
    [
        ("train", "train.de-en.de.bin", "half", "ValueError: (offset must be|buffer is smaller)"),
        ("generate", "test.de-en.de.idx", "empty", "AssertionError: Index file doesn't match expected format"),
    ],
)
def test_damaged_sentences_are_refused_by_fairseq(translation, command, file, harm, said, tmp_path):
    """At the latest at the end of the file, so no epoch is completed."""
    code, heard = call(command, harmed(translation.data, tmp_path, file, harm), translation, tmp_path)
    assert code == 1
    assert re.search(f"^{said}", heard, re.MULTILINE)
    assert not list(tmp_path.glob("checkpoint*"))


def test_an_empty_text_is_refused(language_model, tmp_path):
    (tmp_path / "text").write_text("")
    (tmp_path / "other").write_text("a b\n")
    words = [f"--trainpref={tmp_path / 'text'}", f"--validpref={tmp_path / 'other'}"]
    known = ["--only-source", "--srcdict", language_model.data / "dict.txt", "--destdir", tmp_path]
    fairseq("preprocess", *known, *words)
    line = failure("train", tmp_path, *LANGUAGE_MODEL, "--save-dir", tmp_path)
    assert line == f"ValueError: {tmp_path}/train.bin contains no tokens; check the text given to fairseq-preprocess"


def preprocessed(known, texts, folder):
    """Binarises pairs of text with the dictionaries of `known`."""
    for name, text in texts.items():
        (folder / name).write_text(text)
    dictionaries = [f"--srcdict={known / 'dict.de.txt'}", f"--tgtdict={known / 'dict.en.txt'}"]
    splits = [f"--{split}pref={folder / split}" for split in dict.fromkeys(name.split(".")[0] for name in texts)]
    fairseq("preprocess", "-s", "de", "-t", "en", *dictionaries, *splits, "--destdir", folder / "bin")
    return folder / "bin"


def test_fairseq_refuses_data_without_sentences(translation, tmp_path):
    """With fairseq's own message, which the documentation explains."""
    texts = {f"{name}.{side}": "ba be\n" * (name != "train") for name in SIZES for side in ("de", "en")}
    code, said = call("train", preprocessed(translation.data, texts, tmp_path), translation, tmp_path)
    assert code == 1, said
    assert not list(tmp_path.glob("checkpoint*"))


# ------------------------------------------------------------------------------------------------ another dictionary


def with_types(data, folder, change):
    """Copies the data and adds types to its dictionaries, or removes some."""
    copy = folder / "other"
    shutil.copytree(data, copy)
    for path in copy.glob("dict.*"):
        lines = path.read_text().splitlines(True)
        path.write_text("".join(lines[:change] if change < 0 else [*lines, *(f"more{n} 1\n" for n in range(change))]))
    return copy


def test_training_on_types_outside_the_dictionary_fails(language_model, translation, tmp_path):
    """fairseq's translation task does not check types before the embeddings are looked up."""
    for model, said in (
        (language_model, r"ValueError: .*/valid.bin has type \d+ and dict.txt only \d+ types: they do not match; r"),
        (translation, "IndexError: index out of range in self"),
    ):
        folder = tmp_path / model.data.parent.name
        code, heard = call("train", with_types(model.data, folder, -9), model, folder)
        assert code == 1
        assert re.match(said, heard.splitlines()[-1])


def test_a_checkpoint_of_another_dictionary_is_refused_in_one_sentence(language_model, translation, tmp_path):
    for model, command, change, part in (
        (language_model, "eval-lm", -1, r"decoder has (\d+) types and does not fit the (\d+) types of dict.txt"),
        (translation, "generate", 3, r"encoder has (\d+) types and does not fit the (\d+) types of the source's"),
    ):
        folder = tmp_path / model.data.parent.name
        code, heard = call(command, with_types(model.data, folder, change), model, folder)
        assert code == 1
        own, given = re.match(rf"ValueError: the checkpoint's {part}", heard.splitlines()[-1]).groups()
        assert int(given) - int(own) == change


def test_training_does_not_start_from_a_checkpoint_of_another_dictionary(language_model, tmp_path):
    """fairseq's last line says that architectures differ; the error before it says how."""
    data = with_types(language_model.data, tmp_path, 1)
    code, heard = call("train", data, language_model, tmp_path, "--finetune-from-model", language_model.last)
    assert code == 1
    said = "does not fit the 25 types of dict.txt; give the data that it was trained on, or another --save-dir to train"
    assert said in heard


def test_a_sweep_refuses_types_outside_the_dictionary(language_model, tmp_path, capsys):
    line = sweep(language_model, with_types(language_model.data, tmp_path, -9), tmp_path, capsys)
    assert re.search(r"/test.bin has type \d+ and dict.txt only \d+ types: they do not match; run", line)


# ------------------------------------------------------------------------------------------------ tiny and huge


@pytest.mark.parametrize("documents", ["line", "blank"])
def test_documents_of_one_token_are_trained_on_and_evaluated(language_model, documents, tmp_path):
    """Empty lines, of one token, are at the start, in the middle and at the end."""
    text = "\n" + "a b a\n\nb\n\n\n\na\n" * 9 + "\n\n"
    for split in ("train", "test"):
        (tmp_path / split).write_text(text)
    words = ["--only-source", "--srcdict", language_model.data / "dict.txt", "--destdir", tmp_path / "bin"]
    fairseq("preprocess", *words, f"--trainpref={tmp_path / 'train'}", f"--testpref={tmp_path / 'test'}")
    where = ["--valid-subset=test", f"--documents={documents}", "--save-dir", tmp_path]
    said = fairseq("train", tmp_path / "bin", *LANGUAGE_MODEL, *where, "--max-epoch=2")
    count = len(text.split()) + text.count("\n")
    for epoch in (1, 2):
        assert sum(record["wpb"] for record in records(said, "train_inner") if record["epoch"] == epoch) == count
    loss, last = records(said, "test")[-1]["test_loss"], tmp_path / "checkpoint_last.pt"
    limit = {"line": "--batch-size=1", "blank": "--max-tokens=50"}[documents]
    found = evaluated(tmp_path / "bin", last, f"--documents={documents}", limit)
    assert found == (count, pytest.approx(loss, abs=1e-4))


def test_sentences_of_one_token_are_trained_on_and_translated(translation, tmp_path):
    """An empty line has one token, the end of the line."""
    texts = {f"{split}.{side}": "ba\n\nbe\n" * 6 for split in SIZES for side in ("de", "en")}
    data = preprocessed(translation.data, texts, tmp_path)
    all_of_them = "--required-batch-size-multiple=1"
    code, said = call("train", data, translation, tmp_path, all_of_them)
    assert code == 0, said
    assert sum(record["bsz"] for record in records(said, "train_inner")) == 18
    code, said = call("generate", data, translation, tmp_path, all_of_them, "--beam=2", "--max-len-b=5")
    assert code == 0, said
    assert len(translations(said)) == 18


def binarised(path, lines, types=20):
    """Writes lines of these lengths; fairseq-preprocess would take a minute for a line of a million words."""
    chance = np.random.default_rng(1)
    builder = MMapIndexedDatasetBuilder(f"{path}.bin", dtype=np.uint16)
    for length in lines:
        builder.add_item(torch.from_numpy(np.append(chance.integers(4, types, length - 1), 2)))
    builder.finalize(f"{path}.idx")


MILLION = 10**6


def test_a_huge_line_is_trained_on_in_segments_and_evaluated_as_one_stream(language_model, tmp_path):
    shutil.copy(language_model.data / "dict.txt", tmp_path)
    for split, lines in (("train", [MILLION // 4]), ("valid", [9]), ("test", [3, MILLION, 1])):
        binarised(tmp_path / split, lines)
    long = ["--decoder-chunk-size=64", "--variant-block-multiple-min=16", "--variant-block-multiple-max=32"]
    words = [*LANGUAGE_MODEL, *long, "--max-tokens=32768", "--max-epoch=1", "--save-dir", tmp_path]
    said = fairseq("train", tmp_path, *words)
    assert sum(record["wpb"] for record in records(said, "train_inner")) == MILLION // 4
    count, loss = evaluated(tmp_path, tmp_path / "checkpoint_last.pt", "--documents=line")
    assert count == 3 + MILLION + 1
    assert loss == pytest.approx(4, abs=0.1)  # sixteen types, equally likely


def test_a_sentence_of_a_million_tokens_is_refused_or_skipped_with_a_warning(translation, tmp_path):
    for path in translation.data.glob("dict.*"):
        shutil.copy(path, tmp_path)
    for language in ("de", "en"):
        binarised(tmp_path / f"test.de-en.{language}", [5, 9, MILLION, 7])
    skip = "--skip-invalid-size-inputs-valid-test"
    code, said = call("generate", tmp_path, translation, tmp_path)
    assert code == 1
    assert re.search(rf"Size of sample #2 is invalid .*{MILLION}.* skip this example with {skip}", said)
    code, said = call("generate", tmp_path, translation, tmp_path, skip)
    assert code == 0, said
    assert re.search(r"1 samples have invalid sizes and will be skipped, .* first few sample ids=\[2\]", said)


# ------------------------------------------------------------------------------------------------ bytes

NO_TEXT = b"ba be\nba \xff be\nbi\n"
NOT_DECODED = r"(UnicodeDecodeError: 'utf-8' codec can't decode byte|ValueError: negative seek position)"


def test_preprocessing_refuses_pairs_that_are_not_utf_8(translation, tmp_path):
    for side, text in (("de", b"ba be\n" * 3), ("en", NO_TEXT)):
        (tmp_path / f"train.{side}").write_bytes(text)
    words = ["-s", "de", "-t", "en", f"--srcdict={translation.data / 'dict.de.txt'}", "--joined-dictionary"]
    line = failure("preprocess", *words, "--trainpref", tmp_path / "train", "--destdir", tmp_path / "bin")
    assert re.match(NOT_DECODED, line)


def test_preprocessing_refuses_text_that_is_not_utf_8(language_model, tmp_path):
    good = b"a b a\n" * 5000
    (tmp_path / "text").write_bytes(good + NO_TEXT + good)
    words = ["--only-source", "--srcdict", language_model.data / "dict.txt", "--trainpref", tmp_path / "text"]
    line = failure("preprocess", *words, "--destdir", tmp_path / "bin", "--workers=2")
    assert re.match(NOT_DECODED, line)
    assert not (tmp_path / "bin" / "train.idx").exists()


def typed(path, errors):
    """Replaces standard input by the file, read with these `errors` for bytes that are not UTF-8."""
    sys.stdin = io.TextIOWrapper(path.open("rb"), encoding="utf-8", errors=errors)


def test_input_that_is_not_utf_8_stops_fairseq_interactive_or_becomes_an_unknown_word(translation, tmp_path):
    (tmp_path / "input").write_bytes(NO_TEXT)
    words = [translation.data, *PLUGIN, *SEARCH, "--cpu", "--path", translation.last, "--buffer-size=9"]
    code, said = Running("interactive", *words, fault=partial(typed, tmp_path / "input", "strict")).wait()
    assert code == 1
    assert "UnicodeDecodeError: 'utf-8' codec can't decode byte 0xff" in said
    code, said = Running("interactive", *words, fault=partial(typed, tmp_path / "input", "surrogateescape")).wait()
    assert code == 0, said
    assert "S-1\tba <unk> be\n" in said
    assert {number for number, *_ in translations(said)} == {0, 1, 2}


def test_to_bytes_writes_any_bytes_as_numbers(tmp_path):
    data = bytes(range(256)) + bytes(random.Random(1).choices(range(256), k=70_000)) + b"\xc3"
    (tmp_path / "data").write_bytes(data)
    program = ROOT / "examples" / "lm" / "to_bytes.py"
    said = fresh("sh", "-c", '"$0" "$1" < "$2"', sys.executable, program, tmp_path / "data")
    assert bytes(map(int, said.split())) == data
    assert [len(line.split()) for line in said.splitlines()] == [65_536, len(data) - 65_536]
