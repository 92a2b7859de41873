"""`mega-fairseq prepare documents`: three formats give the same files, and nothing is dropped in silence."""

import html
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mega_fairseq.cli.main import main
from tests.helpers.recipes import EXAMPLES, small_bible, text, write

SPLITS, LANGUAGES = ("train", "valid", "test"), ("de", "en")
LINE_ENDS = ("\n", "\r\n")
WORDS = st.lists(st.sampled_from(["Und", "a&b", "<ß", "x\u2028y", "a\u00a0b", "c\td", "e\rf"]), min_size=1, max_size=4)
TEXTS = st.lists(st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=4), min_size=1, max_size=3)  # of documents


def prepare(source, out, boundaries, *options):
    return ["prepare", "documents", str(out), str(source), "--boundaries", boundaries, *options]


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def marked_up(line):
    """As text with entities, or as CDATA."""
    return html.escape(line) if len(line) % 2 or "]]>" in line else f"<![CDATA[{line}]]><!-- <seg>no</seg> -->"


def write_formats(folder, splits, ends, between):
    """The same documents with ids, with blank lines, and as WMT's files: .sgm for train, .xml for the others."""
    places = {name: folder / name for name in ("ids", "blank", "wmt")}
    for place in places.values():
        place.mkdir()
    for split, documents in splits.items():
        names = [f"{split} {number}" for number in range(1, len(documents) + 1)]
        ids = [name for name, document in zip(names, documents) for _ in document]
        (places["ids"] / f"{split}.docs").write_bytes("\n".join(ids).encode())
        markup = []
        for side, language in enumerate(LANGUAGES):
            blocks = [[" ".join(pair[side]) for pair in document] for document in documents]
            for name, gap, lines in (
                ("ids", "", "".join(f"{line}{ends}" for block in blocks for line in block)),
                ("blank", ends * between, (ends * (between + 1)).join(ends.join(block) for block in blocks)),
            ):
                (places[name] / f"{split}.{language}").write_bytes(f"{gap}{lines}{gap}".encode())
            segments = ["".join(f'<seg id="1"> {marked_up(line)}</seg>\n' for line in block) for block in blocks]
            markup.append(segments)
            tag = '<srcset srclang="any">' if language == "de" else '<refset srclang="any" trglang="en">'
            docs = "".join(f'<doc sysid="x" docid="{name}">{part}</doc>' for name, part in zip(names, segments))
            if split == "train":
                kind = "src" if language == "de" else "ref"
                docs = docs.replace("<doc ", "<DOC ").replace("docid=", "DocID=").replace("<seg", "<SEG")
                (places["wmt"] / f"train-{kind}.{language}.sgm").write_bytes((tag + docs).encode())
        if split != "train":
            docs = "".join(
                f'<doc origlang="de" id="{name}"><src lang="de"><p>{source}</p></src><ref lang="en" translator="A">'
                f'{target}</ref><ref lang="en" translator="B">{target}</ref><hyp system="S" language="en">{target}'
                "</hyp></doc>"
                for name, source, target in zip(names, *markup)
            )
            (places["wmt"] / f"{split}.xml").write_bytes(docs.encode())
    return places


@given(st.fixed_dictionaries(dict.fromkeys(SPLITS, TEXTS)), st.sampled_from(LINE_ENDS), st.integers(1, 2))
def test_the_same_documents_in_any_format_give_the_same_files(splits, ends, between):
    with tempfile.TemporaryDirectory() as folder:
        places = write_formats(Path(folder), splits, ends, between)
        made = {}
        for name, place in places.items():
            assert main(prepare(place, Path(folder) / f"{name}-out", name)) == 0
            made[name] = contents(Path(folder) / f"{name}-out")
        assert made["ids"] == made["blank"] == made["wmt"]
        for split, documents in splits.items():
            for side, language in enumerate(LANGUAGES):
                expected = [" ".join(" ".join(pair[side]).split()) for document in documents for pair in document]
                assert made["ids"][f"{split}.{language}"].decode().split("\n")[:-1] == expected


@pytest.fixture
def bible(tmp_path):
    (tmp_path / "bible").mkdir()
    return small_bible(tmp_path / "bible")


def test_whole_documents_are_held_out_of_one_text(tmp_path, cli):
    source = tmp_path / "source"
    source.mkdir()
    documents = [[f"{number}.{line}" for line in range(number % 3 + 1)] for number in range(60)]
    for language in LANGUAGES:
        (source / f"corpus.{language}").write_text("\n\n".join("\n".join(lines) for lines in documents))
    held_out = set()
    for seed in (1, 1, 2):
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        code, said, _ = cli(*prepare(source, tmp_path / "out", "blank", f"--seed={seed}"))
        assert code == 0
        found = [line for split in SPLITS for line in text(tmp_path / "out" / f"{split}.de")]
        assert sorted(found) == sorted(line for lines in documents for line in lines)
        ids = {split: text(tmp_path / "out" / f"{split}.docs") for split in SPLITS}
        assert [len(set(ids[split])) for split in SPLITS] == [54, 3, 3]
        assert not set(ids["train"]) & set(ids["test"])
        held_out.add(tuple(ids["test"]))
    assert len(held_out) == 2
    assert "train: 54 documents, " in said
    assert "test shares 0 of its " in said


def changed(path, change):
    lines = text(path)
    change(lines)
    write(path, lines)


@pytest.mark.parametrize(
    ("boundaries", "name", "change", "words"),
    [
        ("ids", "train.de", lambda lines: lines.pop(), ["line 100 ", "train.de"]),
        ("ids", "train.de", lambda lines: lines.__setitem__(6, " "), ["line 7 ", "train.de"]),
        ("ids", "valid.docs", lambda lines: lines.pop(), ["valid.docs", "9, 10, 10", "line 10 "]),
        ("ids", "train.docs", lambda lines: lines.__setitem__(50, lines[0]), ["line 51 ", "train.docs"]),
        ("ids", "train.docs", lambda lines: lines.__setitem__(50, ""), ["line 51 ", "train.docs"]),
        ("ids", "test.docs", lambda lines: lines.__setitem__(slice(None), ["Gen 1"] * 10), ["'Gen 1'", "test"]),
        ("ids", "test.en", lambda lines: lines.__setitem__(2, "a <sep> b"), ["line 3 ", "test.en", "--separator"]),
        ("blank", "valid.en", lambda lines: lines.insert(4, ""), ["line 5 ", "valid.en"]),
        ("wmt", "", None, ["nothing"]),
    ],
)
def test_text_that_does_not_fit_is_refused_with_its_line(bible, tmp_path, refuses, boundaries, name, change, words):
    write(bible / "train.docs", ["Gen 1"] * 31 + ["Gen 2"] * 69)
    if change:
        changed(bible / name, change)
    if boundaries == "blank":
        for path in bible.glob("*.docs"):
            path.unlink()
    refuses(*prepare(bible, tmp_path / "out", boundaries), words=words)


def test_another_encoding_is_refused_with_its_line(bible, tmp_path, refuses):
    (bible / "train.en").write_bytes((bible / "train.en").read_bytes().replace(b"\n", b"\n\xe4", 1))
    refuses(*prepare(bible, tmp_path / "out", "ids"), words=["line 2 ", "UTF-8"])


def test_a_segment_missing_in_one_language_is_refused(tmp_path, refuses):
    seg = "<seg>a</seg>"
    (tmp_path / "test.xml").write_text(f'<doc id="d"><src lang="de">{seg}{seg}</src><ref lang="en">{seg}</ref></doc>')
    refuses(*prepare(tmp_path, tmp_path / "out", "wmt"), words=["segment 2 ", "'d'"])


def test_a_document_of_wmt_that_returns_is_refused(tmp_path, refuses):
    sides = '<src lang="de"><seg>{0}</seg></src><ref lang="en"><seg>{0}</seg></ref>'
    documents = (f'<doc id="{name}">{sides.format(number)}</doc>' for number, name in enumerate("aba"))
    (tmp_path / "test.xml").write_text("".join(documents))
    refuses(*prepare(tmp_path, tmp_path / "out", "wmt"), words=["line 3 ", "'a'"])


def test_cleaning_removes_the_ids_of_the_same_pairs(tmp_path):
    write(tmp_path / "en", ["a", "", "c", "d"])
    write(tmp_path / "de", ["a", "b", "c", "d"])
    write(tmp_path / "docs", ["1", "1", "1", "2"])
    program = [sys.executable, EXAMPLES / "wmt16_en_de/clean_pairs.py"]
    command = [*program, "en", "de", "clean.en", "clean.de", 80, 9, "docs", "clean.docs"]
    subprocess.run(list(map(str, command)), cwd=tmp_path, check=True)
    assert [text(tmp_path / f"clean.{kind}") for kind in ("en", "docs")] == [["a", "c", "d"], ["1", "1", "2"]]
    write(tmp_path / "docs", ["1", "1", "1"])
    result = subprocess.run(list(map(str, command)), cwd=tmp_path, capture_output=True, text=True)
    assert (result.returncode, "line 4" in result.stderr) == (1, True)
