"""Binarised texts of language models are read in any format of fairseq, and refused if damaged."""

import re
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from fairseq.data import Dictionary

from mega_fairseq.data import Corpus, StreamDataset
from mega_fairseq.data.classification.inputs import Tokens
from mega_fairseq.data.windows import Draw, windows
from mega_fairseq.documents import read_lines
from mega_fairseq.tasks import MegaLanguageModelingConfig, MegaLanguageModelingTask
from tests.helpers.commands import fairseq
from tests.helpers.corpora import in_memory, tokens


def write(path, content):
    path.write_text("".join(line + "\n" for line in content))
    return path


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The same text in each format: lines of 3, 0, 0, 1 and 2 words as train, one long line as train1."""
    root, made = tmp_path_factory.mktemp("formats"), {}
    first = write(root / "train", ["a b c", "", "", "d", "e f"])
    second = write(root / "train1", [" ".join("abcdef"[i * i % 6] for i in range(5000))])
    empty = write(root / "empty", [])
    for impl in ("mmap", "cached", "lazy"):
        made[impl] = root / impl
        words = ["--only-source", "--dataset-impl", impl, "--destdir", root / impl]
        fairseq("preprocess", *words, "--trainpref", first, "--validpref", empty, "--testpref", second)
        for kind in ("bin", "idx"):
            (root / impl / f"test.{kind}").rename(root / impl / f"train1.{kind}")
    return made


@pytest.fixture(params=["mmap", "cached", "lazy"])
def folder(folders, request):
    return folders[request.param]


def load(folder, split="train", combine=False):
    return Corpus.load(str(folder / split), Dictionary.load(str(folder / "dict.txt")), combine)


def copied(folder, where, split="train"):
    for name in ("dict.txt", f"{split}.bin", f"{split}.idx"):
        (where / name).write_bytes((folder / name).read_bytes())
    return where


def test_a_corpus_is_its_lines_concatenated_in_any_format_of_fairseq_preprocess(folder):
    words, corpus = Dictionary.load(str(folder / "dict.txt")), load(folder)
    assert words.string(corpus.read(0, len(corpus)), include_eos=True) == "a b c </s> </s> </s> d </s> e f </s>"
    assert corpus.lines.tolist() == [4, 1, 1, 2, 3]


def test_parts_are_concatenated_on_request_even_if_one_is_empty(folder, tmp_path):
    copied(folder, tmp_path)
    for number, split in ((1, "valid"), (2, "train1")):
        for kind in ("bin", "idx"):
            (tmp_path / f"train{number}.{kind}").write_bytes((folder / f"{split}.{kind}").read_bytes())
    first, both = load(folder), load(tmp_path, combine=True)
    assert (len(first), len(both)) == (11, 11 + 5001)
    torch.testing.assert_close(both.read(0, 11), first.read(0, 11))
    torch.testing.assert_close(both.read(11, 5012), load(folder, "train1").read(0, 5001))
    assert both.lines.tolist() == [*first.lines.tolist(), 5001]


def refusal(*arguments, **options):
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        load(*arguments, **options)
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence


def test_a_split_without_a_token_is_refused(folder):
    assert "valid.bin contains no tokens; check the text" in refusal(folder, "valid")


def test_a_missing_split_is_refused_with_its_name(folder):
    assert "tset.bin and " in refusal(folder, "tset")


def test_a_dictionary_of_other_data_is_refused(folder, tmp_path):
    lines = (copied(folder, tmp_path) / "dict.txt").read_text().splitlines()
    write(tmp_path / "dict.txt", lines[:3])
    assert "has type 9 and dict.txt only 7 types" in refusal(tmp_path)


def test_the_padding_symbol_in_a_text_is_refused(tmp_path):
    text = write(tmp_path / "text", ["a b", "c <pad> d"])
    fairseq("preprocess", "--only-source", "--trainpref", text, "--destdir", tmp_path / "bin")
    assert "contains <pad>, which fairseq uses for padding; remove that word" in refusal(tmp_path / "bin")


@pytest.mark.parametrize("kept", [0, 11, -1])
def test_a_truncated_file_of_tokens_is_refused(folder, tmp_path, kept):
    file = copied(folder, tmp_path) / "train.bin"
    file.write_bytes(file.read_bytes()[:kept])
    assert "one of them is damaged; run fairseq-preprocess again" in refusal(tmp_path)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of fairseq's half-read index
@pytest.mark.parametrize("kept", [0, 8, 40])
def test_a_truncated_index_is_refused(folder, tmp_path, kept):
    file = copied(folder, tmp_path) / "train.idx"
    file.write_bytes(file.read_bytes()[:kept])
    assert re.search(r"train\.idx .*damaged.*; run fairseq-preprocess again", refusal(tmp_path))


# ------------------------------------------------------------------------------------------------ documents


def test_a_range_is_returned_as_a_copy():
    corpus = in_memory([5])
    corpus.read(1, 3).zero_()
    assert corpus.read(0, 5).tolist() == tokens(5).tolist()


@pytest.mark.parametrize(
    ("how", "lines", "borders"),
    [
        ("stream", [3, 1, 5], [0, 9]),
        ("line", [3, 1, 5], [0, 3, 4, 9]),
        ("line", [0, 3, 0, 5, 0], [0, 3, 8]),
        ("line", [1, 1, 1], [0, 1, 2, 3]),
        ("blank", [3, 4, 1, 5, 2], [0, 8, 15]),
        ("blank", [3, 1, 1, 1, 5], [0, 6, 11]),  # several blank lines are one boundary
        ("blank", [1, 3, 1], [0, 1, 5]),
        ("blank", [3, 4], [0, 7]),
        ("blank", [1, 1], [0, 2]),
    ],
)
def test_documents_end_at_the_chosen_boundaries(how, lines, borders):
    assert in_memory(lines).documents(how).tolist() == borders


@pytest.mark.parametrize(
    ("how", "lines", "warned"), [("blank", [3, 4], True), ("blank", [3, 1], False), ("stream", [3], False)]
)
def test_documents_without_a_blank_line_warn(how, lines, warned, caplog):
    in_memory(lines).documents(how)
    assert ("--documents blank" in caplog.text) == warned


# ------------------------------------------------------------------------------------------------ folders


LINES = 50_000
BORDERS = np.arange(0, 2 * LINES + 1, 2)
SIDES = np.stack([BORDERS, BORDERS], 1)
AT_START = {
    "inputs": lambda corpus, ids: Tokens(Path("train"), None),
    "batches": lambda corpus, ids: StreamDataset(corpus, BORDERS, 1, 2).batch_by_size(np.arange(LINES), 1000),
    "windows": lambda corpus, ids: windows(np.arange(0, LINES + 1, 10), SIDES, 100, Draw(1, 1.0, False), 1),
    "ids": lambda corpus, ids: read_lines(ids),
}


@pytest.mark.parametrize("name", AT_START)
def test_lines_are_no_python_objects_in_memory(name, tmp_path, monkeypatch):
    corpus = in_memory([2] * LINES)
    monkeypatch.setattr(Corpus, "load", lambda *unused: corpus)
    ids = write(tmp_path / "train.docs", [f"document {line // 10}" for line in range(LINES)])
    tracemalloc.start()
    try:
        AT_START[name](corpus, ids)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak / LINES < 40, "bytes of a few arrays"


def test_a_model_without_chunks_requires_a_segment_length(folders):
    made = MegaLanguageModelingTask.setup_task(MegaLanguageModelingConfig(data=str(folders["mmap"])))
    with pytest.raises(ValueError, match="give --tokens-per-sample"):
        made.load_dataset("train")


def test_a_folder_without_a_dictionary_or_no_folder_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="dict.txt"):
        MegaLanguageModelingTask.setup_task(MegaLanguageModelingConfig(data=str(tmp_path)))
    with pytest.raises(ValueError, match="there is no data; give the folder"):
        MegaLanguageModelingTask.setup_task(MegaLanguageModelingConfig())


def test_several_folders_alternate_by_epoch_with_all_their_parts(folders, tmp_path):
    copied(folders["mmap"], tmp_path, "train1")
    for kind in ("bin", "idx"):
        (tmp_path / f"train1.{kind}").rename(tmp_path / f"train.{kind}")
    data = f"{folders['mmap']}:{tmp_path}"
    made = MegaLanguageModelingTask.setup_task(MegaLanguageModelingConfig(data=data, tokens_per_sample=8, seed=1))
    sizes = []
    for number in (1, 2, 3):
        made.load_dataset("train", epoch=number, combine=True)
        sizes.append(len(made.dataset("train").corpus))
    assert sizes == [5012, 5001, 5012]
