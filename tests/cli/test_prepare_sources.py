"""`mega-fairseq prepare` of published data: content, checks, archives, and interrupted runs."""

import gzip
import io
import os
import pickle
import sys
import tarfile
from collections import Counter

import numpy as np
import pytest

from mega_fairseq.cli import main as command
from mega_fairseq.cli.prepare import folder as prepared_folder
from mega_fairseq.cli.prepare import image, speech, tables
from mega_fairseq.cli.prepare.splits import published as published_splits
from mega_fairseq.data.classification.inputs import Scaling
from mega_fairseq.data.classification.labels import class_numbers
from mega_fairseq.data.classification.layouts import open_folder
from tests.helpers import published
from tests.helpers.commands import refused_by
from tests.helpers.prepared import contents, value

SPLITS = ("train", "valid", "test")
ARCHIVED = {"text": "aclImdb", "image": "cifar-10-batches-py", "speech": "."}


@pytest.fixture
def small(monkeypatch):
    """Small numbers of examples, in this process only."""
    for sizes in published.SIZES.values():
        for module, name, number in sizes:
            monkeypatch.setattr(module, name, number)


@pytest.fixture
def source(small, tmp_path):
    return lambda data: published.write(data, tmp_path / "source")


@pytest.fixture
def run(tmp_path, capsys):
    """Prepares data in this process: what it wrote and what it printed."""

    def run(data, source, *options, out="out"):
        code = command.main(["prepare", data, str(tmp_path / out), str(source), *(options or ["--workers=1"])])
        printed, errors = capsys.readouterr()
        assert code == 0, errors
        return contents(tmp_path / out), printed

    return run


@pytest.fixture
def refuse(tmp_path, capsys):
    def refuse(data, source, *words, options=()):
        code = command.main(["prepare", data, str(tmp_path / "out"), str(source), "--workers=1", *options])
        refused_by("prepare", (code, *capsys.readouterr()), *words)

    return refuse


def lines(content):
    assert content.endswith(b"\n")
    return content.split(b"\n")[:-1]


def arrays(out):
    return {split: np.load(out / f"{split}.npy", mmap_mode="r") for split in SPLITS}


# ------------------------------------------------------------------------------------------- contents


def test_reviews_are_bytes_and_some_of_train_are_held_out(source, run):
    files, printed = run("text", source("text"))
    assert lines(files["labels.txt"]) == [b"neg", b"pos"]
    found = {split: list(zip(lines(files[f"{split}.label"]), lines(files[f"{split}.input"]))) for split in SPLITS}
    assert {split: Counter(label for label, _ in found[split]) for split in SPLITS} == {
        "train": {b"neg": 24, b"pos": 24}, "valid": {b"neg": 6, b"pos": 6}, "test": {b"neg": 30, b"pos": 30}
    }  # fmt: skip
    expected = {"train": [], "test": []}
    for name, content in published.reviews().items():
        split, label, _ = name.split("/")
        expected[split].append((label.encode(), content))
    assert sorted(found["train"] + found["valid"]) == sorted(expected["train"])
    assert sorted(found["test"]) == sorted(expected["test"])
    assert "12 of the 60 published training reviews" in printed


def test_another_seed_holds_out_other_reviews(source, run):
    place = source("text")
    mine, others = (
        run("text", place, "--workers=1", f"--seed={seed}", out=f"out{seed}")[0]["valid.input"] for seed in (1, 2)
    )
    assert mine != others


def test_pairs_are_cut_and_their_labels_are_whole_numbers(source, run):
    files, _ = run("retrieval", source("retrieval"))
    for split, rows in zip(SPLITS, published.pairs().values()):
        columns = [lines(files[f"{split}.{name}"]) for name in ("label", "input", "input1")]
        assert list(zip(*columns)) == [(row[0][:1], row[3][:4000], row[4][:4000]) for row in rows]
    assert max(map(len, lines(files["train.input"]))) == 4000


def test_expressions_lose_their_parentheses_only(source, run):
    files, _ = run("listops", source("listops"))
    for split, found in zip(SPLITS, published.trees().values()):
        texts = [line.decode() for line in lines(files[f"{split}.input"])]
        assert texts == [" ".join(tree.symbols) for tree in found]
        assert [value(text) for text in texts] == list(map(int, lines(files[f"{split}.label"])))


@pytest.mark.parametrize("piece", [1, 7, 100, 10**6])
def test_pieces_of_any_size_have_every_row_once(piece, source, run, monkeypatch):
    place = source("listops")
    monkeypatch.setattr(tables, "PIECE", piece * 31)
    files, _ = run("listops", place)
    assert len(lines(files["train.input"])) == 50


def test_grey_images_equal_pillows(source, run, tmp_path):
    modes = pytest.importorskip("PIL.Image")
    files, _ = run("image", source("image"))
    expected = {}
    for name, (pixels, labels) in published.batches().items():
        colours = pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        grey = [np.asarray(modes.fromarray(image).convert("L")) for image in colours]
        expected[name] = [(image.LABELS[label].encode(), g.tobytes()) for label, g in zip(labels, grey)]
    *train, test = expected.values()
    found = {
        split: list(zip(lines(files[f"{split}.label"]), (row.tobytes() for row in array)))
        for split, array in arrays(tmp_path / "out").items()
    }
    assert found["test"] == test
    assert sorted(found["train"] + found["valid"]) == sorted(sum(train, []))
    assert [len(found[split]) for split in SPLITS] == [90, 10, 20]
    assert lines(files["labels.txt"])[3] == b"cat"


def test_clips_of_a_second_are_split_with_all_words_in_equal_shares(source, run, tmp_path):
    files, printed = run("speech", source("speech"))
    found = arrays(tmp_path / "out")
    assert {split: (array.shape, array.dtype.str) for split, array in found.items()} == {
        "train": ((70, 16_000), "<i2"), "valid": ((15, 16_000), "<i2"), "test": ((15, 16_000), "<i2")
    }  # fmt: skip
    rows = [
        (label.decode(), row.tobytes())
        for split in SPLITS
        for label, row in zip(lines(files[f"{split}.label"]), found[split])
    ]
    whole = [(name.split("/")[0], each.tobytes()) for name, each in published.clips().items() if len(each) == 16_000]
    assert sorted(rows) == sorted(whole)
    assert "left out 8 clips" in printed
    words = Counter(label for label, _ in whole)
    for split, share in zip(SPLITS, (0.7, 0.15, 0.15)):
        counts = Counter(line.decode() for line in lines(files[f"{split}.label"]))
        assert all(abs(counts[word] - share * words[word]) <= 1 for word in words)
    assert lines(files["labels.txt"])[:3] == [b"yes", b"no", b"up"]


def test_pictures_are_split_in_the_order_of_the_metadata(source, run, tmp_path):
    pytest.importorskip("PIL.Image")
    files, _ = run("pathfinder", source("pathfinder"))
    rows = list(published.pictures().values())
    for number, (split, array) in enumerate(arrays(tmp_path / "out").items()):
        chosen = np.flatnonzero(published_splits((32, 4, 4)) == number)
        assert np.array_equal(array, [rows[row][0].ravel() for row in chosen])
        assert lines(files[f"{split}.label"]) == [b"%d" % rows[row][1] for row in chosen]
    assert files["examples.png"].startswith(b"\x89PNG")
    (tmp_path / "out/examples.png").unlink()  # as without matplotlib, whose warning says to run the command again
    assert run("pathfinder", tmp_path / "source/pathfinder")[0] == files


CLASSES = {"text": ["neg", "pos"], "image": list(image.LABELS), "speech": list(speech.LABELS)}


@pytest.mark.parametrize("data", published.SIZES)
def test_the_task_reads_the_files_and_classes(data, source, run, tmp_path):
    run(data, source(data))
    kind = "values" if data in ("image", "speech", "pathfinder") else "bytes"
    layout = open_folder(str(tmp_path / "out"), kind, Scaling(0, 1))
    for split in SPLITS:
        inputs, labels = layout.inputs(split), layout.labels(split)
        assert [len(each) for each in inputs] == [len(labels)] * (2 if data == "retrieval" else 1)
        class_numbers(labels, layout.classes(), split)
    numbers = 10 if data == "listops" else 2
    assert layout.classes() == CLASSES.get(data, list(map(str, range(numbers))))


# ------------------------------------------------------------------------------------------- archives


@pytest.mark.parametrize("data", ARCHIVED)
def test_an_archive_gives_the_files_of_its_folder(data, source, run):
    place = source(data)
    files, printed = run(data, place)
    packed, same = run(data, published.archive(place, ARCHIVED[data]), out="packed")
    for each in (files, packed):
        del each["prepare.json"]  # has the name of the source
    assert packed == files
    assert same.replace("packed", "out") == printed


def test_a_truncated_archive_is_refused_and_a_whole_one_continues(source, run, refuse):
    path = published.archive(source("text"), "aclImdb")
    whole = path.read_bytes()
    for part in (whole[: len(whole) // 2], whole[:-1], whole[:5], b"", b"<html>", whole[:-100] + whole[-99:]):
        path.write_bytes(part)
        refuse("text", path, path, "is not a .tar.gz archive", "give the folder aclImdb")
    path.write_bytes(gzip.compress(b"<html>" * 1000))
    refuse("text", path, path, "is not a .tar.gz archive")
    path.write_bytes(whole)
    assert len(lines(run("text", path)[0]["test.input"])) == 60


@pytest.mark.parametrize("size", [-1, -512, 2**60])
@pytest.mark.parametrize("damaged", ["one.txt", "two.txt"])
@pytest.mark.parametrize("folder", ["aclImdb/train/pos", "elsewhere"])
def test_an_archive_with_a_damaged_size_is_refused(size, damaged, folder, source, refuse, tmp_path):
    content = io.BytesIO()
    for name in ("one.txt", "two.txt"):
        member = tarfile.TarInfo(f"{folder}/{name}")
        member.size = size if name == damaged else 3
        content.write(member.tobuf(tarfile.GNU_FORMAT) + name[:3].encode() + bytes(509))
    path = tmp_path / "damaged.tar.gz"
    path.write_bytes(gzip.compress(content.getvalue() + bytes(1024)))
    refuse("text", path, path, "is not a .tar.gz archive")


def test_an_archive_with_a_damaged_header_is_refused(refuse, tmp_path):
    path = tmp_path / "damaged.tar.gz"
    with tarfile.open(path, "w:gz", format=tarfile.PAX_FORMAT) as file:
        member = tarfile.TarInfo("aclImdb/train/pos/one.txt")
        member.pax_headers, member.size = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}, 3
        file.addfile(member, io.BytesIO(b"one"))
    refuse("text", path, path, "is not a .tar.gz archive")


def test_after_a_wrong_archive_another_one_is_read_into_the_same_folder(source, run, refuse, tmp_path):
    place = source("text")
    wrong = published.archive(place, "something_else").rename(tmp_path / "wrong.tar.gz")
    refuse("text", wrong, "has 0 reviews in train/neg instead of 30")
    right = published.archive(place, "aclImdb")
    files, _ = run("text", right)
    assert len(lines(files["test.input"])) == 60
    refuse("text", place, "other settings", right)


# -------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("data", published.SIZES)
def test_a_missing_or_other_source_is_refused_before_anything_is_written(data, refuse, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other/readme.txt").write_text("something else")
    for place in (tmp_path / "other", tmp_path / "none"):
        refuse(data, place, place, "give the folder")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("data", "missing", "words"),
    [
        ("text", "test/neg/3_*.txt", ["has 29 reviews in test/neg instead of 30"]),
        ("retrieval", "new_aan_pairs.eval.tsv", ["eval.tsv", "No such file"]),
        ("listops", "basic_val.tsv", ["basic_val.tsv", "No such file"]),
        ("image", "data_batch_4", ["has no data_batch_4"]),
        ("speech", "no/0002_*.wav", ["has 99 clips of 16,000 samples instead of 100"]),
        ("pathfinder", "*/metadata/2.npy", ["has 30 pictures instead of 40"]),
        ("pathfinder", "*/imgs/2/sample_3.png", ["sample_3.png is missing"]),
    ],
)
def test_a_missing_file_is_noticed(data, missing, words, source, refuse):
    place = source(data)
    (path,) = place.glob(missing)
    path.unlink()
    refuse(data, place, *words, "give the folder")


HEADER = b"Source\tTarget\n"
BLACK = np.zeros((published.SIDE, published.SIDE), np.uint8)
PIXELS, NUMBERS = published.batches()["test_batch"]


@pytest.mark.parametrize(
    ("data", "name", "content", "words"),
    [
        ("text", "test/pos/7_*.txt", b"", ["pos/7_", "is empty"]),
        ("text", "test/pos/7_*.txt", b" \t", ["pos/7_", "is empty"]),
        ("text", "test/pos/7_*.txt", b"one\ntwo", ["pos/7_", "contains a line break"]),
        ("retrieval", "*.eval.tsv", b"1.0\ta\tb\ttext\ttext\n0.0\ta\tb\ttext\n", ["eval.tsv: row 2 has 4 columns"]),
        ("retrieval", "*.eval.tsv", b"2.0\ta\tb\ttext\ttext\n", ["eval.tsv: row 1 has the label '2.0'"]),
        ("retrieval", "*.eval.tsv", b"1.0\ta\tb\ttext\t\n", ["eval.tsv: row 1 has an empty document"]),
        ("retrieval", "*.eval.tsv", b"", ["eval.tsv has 0 rows"]),
        ("retrieval", "*.train.tsv", b"1.0\ta\tb\ttext\ttext\n" * 39, ["train.tsv has 39 rows instead of 40"]),
        ("listops", "*_val.tsv", HEADER + b"( ( ( [MAX 2 ) 9 ) ] )\t8\n", ["row 2 has the value '8' instead of 9"]),
        ("listops", "*_val.tsv", HEADER + b"( ( ( [SUM 2 ) 9 ) ] )\t8\n", ["row 2 is not an expression"]),
        ("listops", "*_val.tsv", HEADER + b"( ( ( [MAX 2 ) 9 )\t9\n", ["row 2 is not an expression"]),
        ("listops", "*_val.tsv", HEADER + b"[SM ]\t0\n", ["row 2 is not an expression"]),
        ("listops", "*_val.tsv", HEADER + b"[MAX 2 9 ]\n", ["row 2 has 1 columns instead of 2"]),
        ("listops", "*_val.tsv", HEADER + b"[MAX 2 9 ]\t9\n" * 4, ["val.tsv has 4 rows instead of 5"]),
        ("listops", "*_val.tsv", b"[MAX 2 9 ]\t9\n" * 5, ["does not begin with 'Source\\tTarget'"]),
        ("image", "data_batch_2", published.batch(PIXELS[:19], NUMBERS[:19]), ["does not have 20 images"]),
        ("image", "data_batch_2", published.batch(PIXELS, [10] * 20), ["does not have 20 images"]),
        ("image", "data_batch_2", published.batch(PIXELS, NUMBERS), ["test_batch have the same images"]),
        ("image", "data_batch_2", published.batch(PIXELS, NUMBERS)[:-500], ["is not a batch of CIFAR-10"]),
        ("image", "data_batch_2", published.batch(PIXELS.astype("u2"), NUMBERS), ["is not a batch of CIFAR-10"]),
        ("image", "data_batch_2", published.batch(np.asfortranarray(PIXELS), NUMBERS), ["is not a batch of CIFAR-10"]),
        ("image", "data_batch_2", published.batch(PIXELS, ["1"] * 20), ["is not a batch of CIFAR-10"]),
        # Neither numbers a place in memory nor asks for bytes that it does not have.
        ("image", "data_batch_2", b"\x80\2Nr" + b"\xff\xff\xff\x7f.", ["is not a batch of CIFAR-10"]),
        ("image", "data_batch_2", b"\x80\5\x96" + (1 << 40).to_bytes(8, "little"), ["is not a batch of CIFAR-10"]),
        ("image", "data_batch_2", b"", ["is not a batch of CIFAR-10"]),
        ("speech", "on/*.wav", published.wav(bytes(16_000), bits=8), ["has 8 bits, 1 channels and 16,000"]),
        ("speech", "on/*.wav", published.wav(bytes(64_000), channels=2), ["has 16 bits, 2 channels and 16,000"]),
        ("speech", "on/*.wav", published.wav(bytes(16_000), rate=8000), ["has 16 bits, 1 channels and 8,000"]),
        ("speech", "on/*.wav", published.wav(bytes(32_002)), ["is longer than a second"]),
        ("speech", "on/*.wav", published.wav(bytes(32_000))[:-2], ["only a part of a file"]),
        ("speech", "on/*.wav", published.wav(bytes(32_000))[:20], ["only a part of one"]),
        ("speech", "on/*.wav", b"", ["is not a WAV file"]),
        ("speech", "on/*.wav", published.wav(bytes(32_000)).replace(b"data\0", b"LIST\xff"), ["is not a WAV file"]),
        ("pathfinder", "*/metadata/2.npy", b"imgs/2 sample_0.png 0\n" * 10, ["2.npy has a line without a label"]),
        ("pathfinder", "*/metadata/2.npy", b"imgs/2 sample_0.png 0 2\n" * 10, ["2.npy has a line without a label"]),
        ("pathfinder", "*/metadata/2.npy", b"\x93NUMPY\x80\xff", ["that are text"]),
        ("pathfinder", "*/imgs/2/sample_0.png", b"", ["sample_0.png is missing, empty or damaged"]),
        ("pathfinder", "*/imgs/2/sample_0.png", lambda: published.picture(BLACK), ["empty or damaged"]),
        ("pathfinder", "*/imgs/2/sample_0.png", lambda: published.picture(BLACK + 1)[:-30], ["empty or damaged"]),
        ("pathfinder", "*/imgs/2/sample_0.png", lambda: published.picture(BLACK + 1, "GIF"), ["empty or damaged"]),
        ("pathfinder", "*/imgs/2/sample_0.png", lambda: published.picture(BLACK[1:] + 1), ["has 7 x 8 pixels"]),
    ],
)  # fmt: skip
def test_bad_files_are_refused_by_name(data, name, content, words, source, refuse):
    place = source(data)
    sorted(place.glob(name))[0].write_bytes(content() if callable(content) else content)
    refuse(data, place, place, *words, "give the folder")


class Code:
    """Runs when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("executed",)


@pytest.mark.parametrize("content", [Code(), {"data": Code(), "labels": []}])
def test_code_in_a_batch_is_not_executed(content, source, refuse, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    place = source("image")
    (place / "data_batch_1").write_bytes(pickle.dumps(content, protocol=2))
    pickle.loads((place / "data_batch_1").read_bytes())
    os.rmdir("executed")
    refuse("image", place, "data_batch_1", "asks for posix.mkdir, which was not executed")
    assert not os.path.exists("executed")


def test_a_missing_pillow_is_named(source, refuse, monkeypatch, tmp_path):
    place = source("pathfinder")
    monkeypatch.setitem(sys.modules, "PIL", None)
    refuse("pathfinder", place, "Pillow", "pip install pillow")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("data", "option"), [("listops", "--train=9"), ("pathfinder", "--size=64"), ("pathfinder", "--seed=2")]
)
def test_options_of_the_generator_are_refused_with_a_source(data, option, refuse, tmp_path):
    refuse(data, tmp_path, option.split("=")[0], "is for generated data", options=[option])


# ---------------------------------------------------------------------------------------- interruptions


@pytest.mark.parametrize("data", published.SIZES)
def test_an_interrupted_preparation_continues(data, source, run, refuse, monkeypatch):
    place = source(data)
    written, write = [], prepared_folder.write

    def interrupted(path, content):
        if len(written) == 1:
            raise KeyboardInterrupt
        write(path, content)
        written.append(path)

    with monkeypatch.context() as patch:
        patch.setattr(prepared_folder, "write", interrupted)
        refuse(data, place, "interrupted; the same command continues")
    (first,) = written

    def counted(path, content):
        written.append(path)
        write(path, content)

    monkeypatch.setattr(prepared_folder, "write", counted)
    files, _ = run(data, place)
    assert written.count(first) == 1
    whole, _ = run(data, place, out="whole")
    assert files == whole
    assert "is complete already" in run(data, place)[1]


def test_two_workers_write_the_files_of_one(source, run):
    place = source("listops")
    assert run("listops", place, "--workers=2", out="two")[0] == run("listops", place)[0]


def test_parts_of_a_file_that_changes_are_made_again(source, run, refuse):
    place = source("text")
    first, last = (min((place / name).glob("9_*.txt")) for name in ("train/neg", "test/pos"))
    content = last.read_bytes()
    last.write_bytes(b"")
    refuse("text", place, "is empty")
    last.write_bytes(content)
    first.write_bytes(b"another review")
    files, _ = run("text", place)
    assert b"another review" in lines(files["train.input"]) + lines(files["valid.input"])


def test_a_file_of_complete_data_that_is_missing_or_has_changed_is_noticed(source, run, refuse, tmp_path):
    place, path = source("text"), tmp_path / "out/train.input"
    run("text", place)
    content = path.read_bytes()
    for damage in (lambda: path.write_bytes(content[:-1]), path.unlink):
        damage()
        refuse("text", place, path, f"is not the file of {len(content):,} bytes that was prepared; remove")
    path.write_bytes(content)
    assert "is complete already" in run("text", place)[1]
