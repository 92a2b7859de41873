"""`mega-fairseq documents split` and `score`: as many lines as the source has, and the scores of sacrebleu."""

import random
import re
import sys
import tempfile
from itertools import accumulate
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mega_fairseq.cli.documents import metrics, translations
from mega_fairseq.cli.documents.translations import Window
from mega_fairseq.cli.main import main
from tests.helpers.commands import ROOT, fresh
from tests.helpers.recipes import small_bible, text, write

TOKENS = ["\u2581Und", "er", "\u2581", "b@@", "<unk>", "x<sep>", "<sep>y"]
LINES = st.lists(st.sampled_from(TOKENS), max_size=4).map(" ".join)
WINDOWS = st.lists(
    st.tuples(st.lists(LINES.filter(bool), min_size=1, max_size=4), st.lists(LINES, min_size=1, max_size=5)),
    min_size=1,
    max_size=5,
)


def generated(window, number):
    """What fairseq-generate prints for a window, with two hypotheses."""
    source, best = (" <sep> ".join(side) for side in window)
    return [f"S-{number}\t{source}", f"T-{number}\tT", f"H-{number}\t-0.5\t{best}", f"D-{number}\t-0.5\t{best}"] + [
        f"P-{number}\t-0.1 -0.2", f"H-{number}\t-1.5\tworse <sep> and worse"
    ]  # fmt: skip


def split(folder, blocks, ids, *options):
    write(folder / "generated", ["INFO | S-0", *(line for block in blocks for line in block), "Generate test"])
    write(folder / "docs", ids)
    return ["documents", "split", *map(str, (folder / "generated", folder / "docs", "--out", folder / "out")), *options]


def check_split(windows, seed):
    """Each line of the source has one line, equal counts are unchanged, and no text is lost or moved elsewhere."""
    blocks = [generated(window, number) for number, window in enumerate(windows)]
    random.Random(seed).shuffle(blocks)
    ids = [str(number // 2) for number, (source, _) in enumerate(windows) for _ in source]
    with tempfile.TemporaryDirectory() as folder:
        assert main(split(Path(folder), blocks, ids)) == 0
        lines = text(Path(folder) / "out.pieces")
    assert len(lines) == len(ids)
    for source, translation in windows:
        part, lines = lines[: len(source)], lines[len(source) :]
        expected = [" ".join(line.split()) for line in translation]
        if len(source) == len(translation):
            assert part == expected
        assert " ".join(part).split() == " ".join(expected).split()


@given(WINDOWS, st.integers(0))
def test_split_gives_one_line_for_each_line_of_the_source(windows, seed):
    check_split(windows, seed)


def anywhere(path, separator):
    """Splits within words, too."""
    return [Window(*(re.sub(" *<sep> *", "<sep>", " ".join(side)).split("<sep>") for side in w)) for w in read(path)]


def in_order_of_the_file(path):
    numbers = [int(line[2:].split()[0]) for line in text(Path(path)) if line.startswith("S-")]
    windows = read(path)
    return [windows[number] for number in numbers]


def read(path, separator="<sep>"):
    return READ(path, separator)


READ = translations.read_windows


def clamped(window):
    """Repeats the last line, or cuts lines, as a known tool does."""
    count = len(window.source)
    return [*window.translation, *window.translation[-1:] * count][:count]


@pytest.mark.parametrize(
    ("name", "twin"),
    [
        ("read_windows", lambda path, separator: anywhere(path, separator)),
        ("read_windows", lambda path, separator: in_order_of_the_file(path)),
        ("fitted", clamped),
    ],
)
def test_a_split_that_loses_or_moves_text_is_noticed(monkeypatch, name, twin):
    windows = [(["a", "b"], ["\u2581a x<sep>", "b"]), (["c", "d"], ["c", "d", "e"]), (["e"], ["<unk>"])]
    check_split(windows, 1)
    monkeypatch.setattr(translations, name, twin)
    with pytest.raises(AssertionError):
        check_split(windows, 1)


A, B = (["a", "b"], ["x", "y"]), (["c"], ["z"])
BLOCKS = [generated(A, 0), generated(B, 1)]


@pytest.mark.parametrize(
    ("blocks", "ids", "words"),
    [
        (BLOCKS, "1 1 2 2", ["3 lines", "4", "--required-batch-size-multiple 1", "--remove-bpe"]),
        (BLOCKS, "1 2 2", ["window 0 ", "'1' and '2'"]),
        (BLOCKS, "1 2 1", ["line 3 "]),
        (BLOCKS[1:], "1", ["window 0 "]),
        ([*BLOCKS, BLOCKS[0]], "1 1 2", ["window 0 ", "twice"]),
        ([BLOCKS[0], BLOCKS[1][:2]], "1 1 2", ["window 1 ", "missing"]),
        ([BLOCKS[0], BLOCKS[1][:3]], "1 1 2", ["window 1 ", "missing"]),  # perhaps in the middle of H
        ([], "1", ["window 0 ", "--quiet"]),
        ([[line.replace(" <sep> ", "<sep>") for line in block] for block in BLOCKS], "1 1 2", ["2 lines", "3"]),
    ],
)
def test_translations_of_other_windows_are_refused(tmp_path, refuses, blocks, ids, words):
    refuses(*split(tmp_path, blocks, ids.split()), words=words)


def test_windows_with_other_counts_are_reported(tmp_path, cli, refuses):
    lines = ["a" * 10, "b" * 10]
    windows = [(lines, ["x" * 10] * 2), (lines, ["x" * 20]), (lines, ["x", "y", "z"])]
    code, said, _ = cli(*split(tmp_path, [generated(w, n) for n, w in enumerate(windows)], ["1"] * 6))
    assert code == 0
    assert re.search(r"2 windows had another number of lines than their source: 1, 2$", said, re.MULTILINE)
    assert text(tmp_path / "out.pieces")[2:] == ["x" * 20, "", "x", "y z"]
    (tmp_path / "out.pieces").unlink()
    (tmp_path / "out.json").write_text("{}")
    refuses(*split(tmp_path, BLOCKS, ["1", "1", "2"]), words=["out.json exists"])


# --------------------------------------------------------------------------------------------- score


WITHOUT_TORCH = "import sys; from mega_fairseq.cli.main import main; main(); assert 'torch' not in sys.modules"


def score(folder, *names):
    """The cells of what `documents score` prints, by the first of each line."""
    words = ["documents", "score", *(name if name.startswith("--") else folder / name for name in names)]
    said = fresh(sys.executable, "-c", WITHOUT_TORCH, *words, cwd=ROOT)
    return {first: cells for first, *cells in (re.split(r":?  +|: ", line) for line in said.splitlines())}


@pytest.fixture
def bible(tmp_path):
    """References and their documents, a system without some words in two windows, and one with other words."""
    folder = small_bible(tmp_path)
    lines = text(folder / "train.de")
    write(folder / "system.de", [re.sub(r"\bdie\b|,", "", line) for line in lines])
    write(folder / "other.de", [re.sub(r"\b[dD]\w+\b", "das", line) for line in lines])
    write(folder / "system.json", ['{"source_lines": [31, 69], "translated_lines": [31, 70]}'])
    return folder


@pytest.mark.slow
def test_scores_are_those_of_the_sacrebleu_command_on_joined_files(bible):
    said = score(bible, "system.de", "train.de", "train.docs", "--against", "other.de", "--figure", "figure.png")
    ids = text(bible / "train.docs")
    for name in ("system.de", "train.de"):
        lines = text(bible / name)
        write(
            bible / f"joined.{name}",
            [" ".join(line for line, own in zip(lines, ids) if own == document) for document in dict.fromkeys(ids)],
        )
    for kind, prefix in (("s", ""), ("d", "joined.")):
        files = [bible / f"{prefix}train.de", "-i", bible / f"{prefix}system.de"]
        printed = fresh(sys.executable, "-m", "sacrebleu", *files, "-m", "bleu", "chrf", "-w", "2", "-f", "text")
        found = re.findall(r"(BLEU|chrF)2?\|(\S+) = (\S+)", printed)
        assert len(found) == 2
        for name, signature, value in found:
            assert said[f"{kind}-{name}"][0] == value
            assert said[name] == [signature]
    assert said[str(bible / "system.de")] == ["2 windows; 1 had another number of lines"]
    assert said["s-BLEU, place in the window 1 (2 of 100 lines)"]
    assert sum("quarter of the document" in name for name in said) == 4
    assert (bible / "figure.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_systems_with_different_windows_are_not_compared_by_their_places(bible):
    write(bible / "other.json", ['{"source_lines": [100], "translated_lines": [90]}'])
    said = score(bible, "system.de", "train.de", "train.docs", "--against", "other.de")
    assert said[str(bible / "other.de")] == ["1 windows; 1 had another number of lines"]
    assert any("quarter of the document" in name for name in said)
    assert not any(name.startswith("s-BLEU, place") for name in said)


DOCUMENTS = st.lists(
    st.lists(st.tuples(*[st.lists(st.sampled_from("abc"), max_size=4).map(" ".join)] * 2), min_size=1, max_size=4),
    min_size=1,
    max_size=4,
)


def measured(documents):
    """BLEU of documents and of lines."""
    borders = list(accumulate((len(document) for document in documents), initial=0))
    sides = [[pair[side] for document in documents for pair in document] for side in (0, 1)]
    bleu = metrics.METRICS["BLEU"]
    joined = [metrics.join(side, borders) for side in sides]
    return bleu.corpus_score(joined[0], [joined[1]]), bleu.corpus_score(sides[0], [sides[1]])


def check_matches(documents):
    document, line = measured(documents)
    assert document.counts[0] >= line.counts[0]
    assert document.totals[0] == line.totals[0]


@given(DOCUMENTS)
def test_documents_match_at_least_the_words_that_their_lines_match(documents):
    check_matches(documents)


def test_exchanged_lines_lower_only_the_score_of_lines():
    lines = [" ".join(f"{line}.{word}" for word in range(6)) for line in range(4)]
    document, line = measured([list(zip(lines, lines))])
    exchanged, exchanged_line = measured([list(zip([lines[1], lines[0], *lines[2:]], lines))])
    assert exchanged_line.score < line.score
    assert exchanged.precisions[0] == document.precisions[0]


def test_documents_joined_without_a_blank_are_noticed(monkeypatch):
    documents = [[("a b", "a b"), ("c", "d")]]
    check_matches(documents)
    monkeypatch.setattr(metrics, "join", lambda lines, borders: ["".join(lines)])
    with pytest.raises(AssertionError):
        check_matches(documents)


def spreads():
    """The intervals that the paired bootstrap prints for six copies of a document."""
    reference = [f"{word} a b c d e f" for word in "uvwxyz"] * 6
    borders = range(0, 37, 6)
    systems = ([line.replace("b", word) if "w" in line else line for line in reference] for word in "bh")
    said = metrics.compare(*(metrics.join(side, borders) for side in (*systems, reference)))
    return re.findall("± ([0-9.]+)", said)


def test_the_bootstrap_draws_documents(monkeypatch):
    assert spreads() == ["0.00"] * 4
    monkeypatch.setattr(metrics, "join", lambda lines, borders: lines)
    assert spreads() != ["0.00"] * 4


def test_few_documents_or_a_single_system_have_no_bootstrap():
    assert "there are 5" in metrics.compare(["a b"] * 5, ["a c"] * 5, ["a b"] * 5)
    assert "equal" in metrics.compare(["a"] * 6, ["a"] * 6, ["b"] * 6)


def test_lines_that_a_reader_should_see_are_counted():
    reference = ["a b c d e f", "g h", "i j", "k l", "m n"]
    counts = metrics.measure(["a b", "x", "x", "", "x y z 1 2 3 4 5 6"], reference, reference, [0, 5], {})
    assert counts["empty lines"] == counts["repeated lines"] == 1
    assert counts["lengths below 1/3 or above 3"] == 2
    repeated = ["a"] * 5
    assert metrics.measure(["x"] * 5, repeated, repeated, [0, 5], {})["repeated lines"] == 0


NO_COUNTS = [
    *["{}", "[" * 100_000, '{"source_lines": [1e400], "translated_lines": [1]}'],
    *(f'{{"source_lines": {lines}, "translated_lines": [100]}}' for lines in ("[100.7]", "[-100, 200]", '"1"')),
]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("system.de", "a\n" * 99, ["system.de has 99", "train.docs has 100"]),
        ("train.de", "a\n" * 99, ["train.de has 99"]),
        ("system.de", "\u2581a\n" * 100, ["system.de has subwords", "undo"]),
        ("train.docs", "a\n" * 50 + "b\n" + "a\n" * 49, ["line 52 ", "'a'"]),
        ("system.de", b"\xe4\n" * 100, ["line 1 ", "UTF-8"]),
        ("system.json", '{"source_lines": [9], "translated_lines": [9]}', ["system.json have 9", "--counts"]),
        *[("counts.json", content, ["counts.json was not written"]) for content in NO_COUNTS],
    ],
)
def test_files_that_do_not_fit_are_refused(bible, refuses, name, content, words):
    (bible / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    files = [str(bible / name) for name in ("system.de", "train.de", "train.docs")]
    options = ["--counts", str(bible / name)] if name == "counts.json" else []
    refuses("documents", "score", *files, *options, words=words)


def test_line_ends_of_other_systems_do_not_change_scores(bible, cli):
    files = [str(bible / name) for name in ("system.de", "train.de", "train.docs")]
    code, before, _ = cli("documents", "score", *files)
    assert code == 0
    for path in files:
        content = Path(path).read_text().replace(" ", "\u2028", 1).replace("\n", "\r\n").rstrip()
        Path(path).write_bytes(content.encode("utf-8-sig"))
    assert cli("documents", "score", *files)[:2] == (0, before)
