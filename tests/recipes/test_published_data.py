"""The programs of examples/ that read published data: every row, the splits, and what they refuse.

Each writer makes small data in the published layout and returns their rows, by the splits among which they are divided.
"""

import io
import itertools
import math
import os
import pickle
import pickletools
import sys
import wave
from random import Random
from typing import Any, Callable, Dict, NamedTuple, Tuple

import numpy as np
import pytest
from PIL import Image

from mega_fairseq.cli import UserError
from mega_fairseq.data.classification.inputs import Scaling
from mega_fairseq.data.classification.labels import class_numbers
from mega_fairseq.data.classification.layouts import open_folder
from tests.helpers.recipes import program

listops, cifar, words = map(program, ("lra/listops/expressions", "lra/image/cifar", "speech_commands/words"))
SPLITS = ("train", "valid", "test")
SIDE = 8  # of the pictures of Pathfinder
CLIP = bytes(32_000)


def put(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def lines(path):
    return path.read_bytes().split(b"\n")[:-1]


def reviews(place):
    random, rows = Random("reviews"), {("train", "valid"): [], ("test",): []}
    for (splits, its), label in itertools.product(rows.items(), ("neg", "pos")):
        folder = place / splits[0] / label
        for number in range(30):
            chosen = random.choices(["good", "b\xe4d", "<br />", "\t", "\x85", "\r"], k=random.randint(1, 9))
            text = f"{folder} {number} {' '.join(chosen)}".encode() + b"\xff" * (number % 2)
            put(folder / f"{number}_{random.randint(1, 10)}.txt", text)
            its.append((label, text))
    put(place / "train/unsup/0_0.txt", b"not labelled")
    put(place / "train/urls_neg.txt", b"not a review")
    return rows


def papers(place):
    random, rows = Random("papers"), {}
    for split, name, count in (("train", "train", 40), ("valid", "eval", 6), ("test", "test", 7)):
        texts = [b"\"%d\xc3\xa9' " % row * random.choice([1, 90, 1500]) for row in range(count + 1)]
        table = [(b"%d.0" % random.randint(0, 1), b"A1", b"B2", *texts[row : row + 2]) for row in range(count)]
        put(place / f"new_aan_pairs.{name}.tsv", b"".join(b"\t".join(row) + b"\n" for row in table))
        rows[(split,)] = [(row[0][:1].decode(), row[3][:4000], row[4][:4000]) for row in table]
    return rows


def expressions(place):
    random, rows = Random("trees").random, {}
    for split, name, count in (("train", "train", 50), ("valid", "val", 5), ("test", "test", 5)):
        drawn = (listops.tree(random, 60) for _ in range(10_000))
        trees = [tree for tree in drawn if tree is not None and len(tree.symbols) > 3][:count]
        table = ["Source\tTarget", *(f"{with_parentheses(iter(tree.symbols))}\t{tree.value}" for tree in trees)]
        put(place / f"basic_{name}.tsv", "".join(f"{row}\r\n" for row in table).encode())
        rows[(split,)] = [(str(tree.value), " ".join(tree.symbols).encode()) for tree in trees]
    return rows


def with_parentheses(symbols):
    """An expression as it is published, for instance ( ( ( [MAX 2 ) 9 ) ] )."""
    text = symbol = next(symbols)
    while symbol.startswith("[") and not text.endswith("] )"):
        text = f"( {text} {with_parentheses(symbols)} )"
    return text


def images(place):
    random, rows = np.random.default_rng(1), {("train", "valid"): [], ("test",): []}
    for name in cifar.BATCHES:
        pixels, labels = random.integers(0, 256, (20, 3072), dtype=np.uint8), random.integers(0, 10, 20).tolist()
        put(place / name, batch(pixels, labels))
        colours = pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        grey = [np.asarray(Image.fromarray(image).convert("L")).tobytes() for image in colours]
        splits = ("test",) if name == "test_batch" else ("train", "valid")
        rows[splits] += [(cifar.LABELS[label], image) for label, image in zip(labels, grey)]
    put(place / "batches.meta", b"not read")
    return rows


class OldPickler(pickle._Pickler):
    """Writes text as Python 2 wrote `str`, and arrays under the names of numpy 1."""

    def save(self, content, *arguments, **options):
        if isinstance(content, (bytes, str)):
            code = content if isinstance(content, bytes) else content.encode()
            self.write(pickle.BINSTRING + len(code).to_bytes(4, "little") + code)
        else:
            super().save(content, *arguments, **options)

    def save_global(self, content, name=None):
        module = "numpy.core.multiarray" if content.__name__ == "_reconstruct" else content.__module__
        self.write(pickle.GLOBAL + f"{module}\n{content.__name__}\n".encode())

    dispatch = {**pickle._Pickler.dispatch, type: save_global, type(len): save_global}


def batch(pixels, labels):
    """A batch of CIFAR-10, as Python 2 pickled it."""
    file = io.BytesIO()
    content = {"batch_label": "a batch", "labels": labels, "data": pixels, "filenames": ["a.png"] * len(labels)}
    OldPickler(file, protocol=2).dump(content)
    pickletools.dis(file.getvalue(), io.StringIO())  # raises if this is not a pickle
    return file.getvalue()


def clips(place):
    random, rows = np.random.default_rng(2), []
    for number in range(108):
        word = words.LABELS[math.isqrt(number)] if number < 100 else "go"  # 1, 3, 5, ... 19 clips of a second
        clip = random.integers(-(2**15), 2**15, 16_000 if number < 100 else 9_000, dtype="<i2").tobytes()
        put(place / f"{word}/{number:04x}_nohash_{number % 3}.wav", wav(clip))
        rows += [(word, clip)] * (number < 100)
    put(place / "bed/0000_nohash_0.wav", b"another word")
    return {SPLITS: rows}


def wav(content, rate=16_000):
    file = io.BytesIO()
    with wave.open(file, "wb") as clip:
        clip.setparams((1, 2, rate, 0, "NONE", ""))
        clip.writeframes(content)
    return file.getvalue()


def pictures(place):
    random, rows = np.random.default_rng(3), []
    for folder, count in ((1, 10), (2, 10), (10, 20)):  # as text, 10 comes before 2
        table = []
        for number in range(count):
            pixels, label = random.integers(0, 256, (SIDE, SIDE), dtype=np.uint8), random.integers(2)
            put(place / f"curv_contour_length_14/imgs/{folder}/sample_{number}.png", png(pixels))
            table.append(f"imgs/{folder} sample_{number}.png {len(rows)} {label} 0.1 1 14\n")
            rows.append((str(label), pixels.tobytes()))
        put(place / f"curv_contour_length_14/metadata/{folder}.npy", "".join(table).encode())
    held_out = {"valid": (28, 20, 26, 31), "test": (30, 36, 1, 5)}  # torch's random_split with seed 42
    return {SPLITS: rows, **{(split,): [rows[number] for number in its] for split, its in held_out.items()}}


def png(pixels):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


class Published(NamedTuple):
    program: str
    numbers: Dict[str, Any]  # of published examples, as the tests replace them
    write: Callable
    kind: str
    sizes: Tuple[int, int, int]  # of train, valid and test
    classes: Tuple[str, ...] = ("0", "1")


TABLES = {"train": ("basic_train.tsv", 50), "valid": ("basic_val.tsv", 5), "test": ("basic_test.tsv", 5)}
PUBLISHED = {
    "text": Published(
        "lra/text/reviews", {"REVIEWS": 30, "HELD_OUT": 12}, reviews, "bytes", (48, 12, 60), ("neg", "pos")
    ),
    "retrieval": Published("lra/retrieval/papers", {"TRAINING": 40}, papers, "bytes", (40, 6, 7)),
    "listops": Published(
        "lra/listops/expressions", {"PUBLISHED": TABLES}, expressions, "bytes", (50, 5, 5), tuple("0123456789")
    ),
    "image": Published("lra/image/cifar", {"IMAGES": 20, "HELD_OUT": 10}, images, "values", (90, 10, 20), cifar.LABELS),
    "speech": Published("speech_commands/words", {"CLIPS": 100}, clips, "values", (70, 15, 15), words.LABELS),
    "pathfinder": Published("lra/pathfinder/published", {"IMAGES": 40}, pictures, "values", (32, 4, 4)),
}


@pytest.fixture
def read(tmp_path, monkeypatch):
    """Writes published data, changes them, and runs their program in this process; returns its result and the rows."""

    def call(data, change=lambda place: None):
        name, numbers, write, *_ = PUBLISHED[data]
        rows = write(tmp_path / "source")
        change(tmp_path / "source")
        for constant, number in numbers.items():
            monkeypatch.setattr(program(name), constant, number)
        if data == "listops":
            monkeypatch.setattr(sys, "argv", [name, str(tmp_path / "out"), f"--source={tmp_path / 'source'}"])
            program(name).main()
        else:
            program(name).main(tmp_path / "source", tmp_path / "out")
        return tmp_path / "out", rows

    return call


@pytest.mark.parametrize("data", PUBLISHED)
def test_every_published_row_is_in_its_split(data, read):
    (out, expected), (*_, kind, sizes, classes) = read(data), PUBLISHED[data]
    rows = {}
    for split in SPLITS:
        labels = [label.decode() for label in lines(out / f"{split}.label")]
        if kind == "values":
            columns = [[row.tobytes() for row in np.load(out / f"{split}.npy")]]
        else:
            columns = [lines(out / f"{split}.{name}") for name in ("input", "input1")[: 1 + (data == "retrieval")]]
        rows[split] = list(zip(labels, *columns))
    assert tuple(map(len, rows.values())) == sizes
    for splits, published in expected.items():
        assert sorted(row for split in splits for row in rows[split]) == sorted(published)
    if data in ("text", "speech"):  # equal shares of all labels
        for label in classes:
            counts = [sum(row[0] == label for row in rows[split]) for split in SPLITS]
            assert all(abs(count - sum(counts) * size / sum(sizes)) <= 1 for count, size in zip(counts, sizes))
    folder = open_folder(str(out), kind, Scaling(0, 1))
    assert tuple(folder.classes()) == classes
    for split, size in zip(SPLITS, sizes):
        assert {len(inputs) for inputs in folder.inputs(split)} == {size}
        class_numbers(folder.labels(split), folder.classes(), split)


@pytest.mark.parametrize(
    ("data", "name", "content", "message"),
    [
        ("text", "test/pos/7_*.txt", b" \t", "pos/7_.* is empty"),
        ("text", "test/neg/3_*.txt", None, "29 reviews"),
        ("retrieval", "*.eval.tsv", b"1.0\ta\tb\ttext\ttext\n0.0\ta\tb\ttext\n", "row 2"),
        ("listops", "*_val.tsv", b"Source\tTarget\n" + b"( ( ( [MAX 2 ) 9 ) ] )\t8\n" * 5, "row 2"),
        ("image", "data_batch_2", "test_batch", "the same images"),
        ("image", "data_batch_2", batch(np.zeros((20, 3072), np.uint8), [11] * 20), "a label is not 0 to 9"),
        # Neither numbers a place in memory nor asks for bytes that it does not have.
        ("image", "data_batch_2", b"\x80\2Nr" + b"\xff\xff\xff\x7f.", "not a batch"),
        ("image", "data_batch_2", b"\x80\5\x96" + (1 << 40).to_bytes(8, "little"), "not a batch"),
        ("speech", "no/0001_*.wav", wav(CLIP, rate=8000), "0001_.* 1 channel"),
        ("speech", "no/0001_*.wav", wav(CLIP)[:-2], "0001_"),
        ("pathfinder", "*/metadata/2.npy", b"imgs/2 sample_0.png 0 2\n" * 10, "column 4"),
        ("pathfinder", "*/imgs/2/sample_0.png", png(np.zeros((SIDE, SIDE), np.uint8)), "sample_0.png is black"),
        ("pathfinder", "*/imgs/2/sample_0.png", png(np.ones((SIDE - 1, SIDE), np.uint8)), "sample_0.png"),
    ],
)
def test_bad_files_are_refused_by_name(data, name, content, message, read, tmp_path):
    def change(place):
        (path,) = place.glob(name)
        if content is None:
            path.unlink()
        else:
            path.write_bytes((place / content).read_bytes() if isinstance(content, str) else content)

    with pytest.raises(UserError, match=message):
        read(data, change)
    assert os.listdir(tmp_path) == ["source"]


class Code:
    """Runs when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("executed",)


@pytest.mark.parametrize("content", [Code(), {"data": Code(), "labels": []}])
def test_code_in_a_batch_is_not_executed(content, read, tmp_path, monkeypatch):
    def change(place):
        monkeypatch.chdir(tmp_path)
        (place / "data_batch_1").write_bytes(pickle.dumps(content, protocol=2))
        pickle.loads((place / "data_batch_1").read_bytes())
        os.rmdir("executed")

    with pytest.raises(UserError, match="posix.mkdir"):
        read("image", change)
    assert not os.path.exists("executed")
