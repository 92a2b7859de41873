"""Small data in the layouts in which data sets are published, for the programs of examples/lra."""

import io
import math
import pickle
import pickletools
import tarfile
import wave
from pathlib import Path
from random import Random
from typing import Any, Dict, Iterator, List, Tuple

import numpy as np

from tests.helpers.recipes import program

listops, image, speech = map(program, ("lra/listops/expressions", "lra/image/cifar", "speech_commands/words"))
pathfinder = program("lra/pathfinder/published")
SIDE = 8  # of the pictures of Pathfinder


def reviews() -> Dict[str, bytes]:
    """By names of files below aclImdb."""
    random, found = Random("reviews"), {}
    for name in ("train/neg", "train/pos", "test/neg", "test/pos"):
        for number in range(30):
            words = [
                random.choice(["good", "b\xe4d", "<br />", "\t", "\x85", "\r"]) for _ in range(random.randint(1, 9))
            ]
            content = f"{name} {number} {' '.join(words)}".encode()
            found[f"{name}/{number}_{random.randint(1, 10)}.txt"] = content + b"\xff" * (number % 2)
    return found


def pairs() -> Dict[str, List[Tuple[bytes, ...]]]:
    random, found = Random("pairs"), {}
    for split, rows in (("train", 40), ("eval", 6), ("test", 7)):
        texts = [b"\"%d\xc3\xa9' " % row * random.choice([1, 90, 1500]) for row in range(rows + 1)]
        found[split] = [(b"%d.0" % random.randint(0, 1), b"A1", b"B2", *texts[row : row + 2]) for row in range(rows)]
    return found


def trees() -> Dict[str, List[Any]]:
    random, found = Random("trees").random, {}
    for split, rows in (("train", 50), ("val", 5), ("test", 5)):
        drawn = (listops.tree(random, 60) for _ in range(10_000))
        found[split] = [tree for tree in drawn if tree is not None and len(tree.symbols) > 3][:rows]
    return found


def with_parentheses(symbols: Iterator[str]) -> str:
    """An expression as it is published, for instance ( ( ( [MAX 2 ) 9 ) ] )."""
    text = symbol = next(symbols)
    while symbol.startswith("[") and not text.endswith("] )"):
        text = f"( {text} {with_parentheses(symbols)} )"
    return text


def batches() -> Dict[str, Tuple[np.ndarray, List[int]]]:
    random, found = np.random.default_rng(1), {}
    for name in image.BATCHES:
        found[name] = random.integers(0, 256, (20, 3072), dtype=np.uint8), random.integers(0, 10, 20).tolist()
    return found


def clips() -> Dict[str, np.ndarray]:
    """By names of files below speech_commands_v0.02; some are shorter than a second."""
    random, found = np.random.default_rng(2), {}
    for number in range(108):
        word = speech.LABELS[math.isqrt(number)] if number < 100 else "go"  # 1, 3, 5, ... 19 clips of a second
        samples = 16_000 if number < 100 else 9_000
        found[f"{word}/{number:04x}_nohash_{number % 3}.wav"] = random.integers(-(2**15), 2**15, samples, dtype="<i2")
    return found


def pictures() -> Dict[str, Tuple[np.ndarray, int]]:
    """By names of files below curv_contour_length_14, in the order of the metadata."""
    random, found = np.random.default_rng(3), {}
    for folder in (1, 2, 10):  # as text, 10 comes before 2
        for number in range(20 if folder == 10 else 10):
            pixels = random.integers(0, 256, (SIDE, SIDE), dtype=np.uint8)
            found[f"imgs/{folder}/sample_{number}.png"] = pixels, int(random.integers(2))
    return found


# ------------------------------------------------------------------------------------------------ files


def write(data: str, folder: Path) -> Path:
    """Writes one of the data sets into a new folder below this one, and returns it."""
    place = folder / {"text": "aclImdb", "image": "cifar-10-batches-py"}.get(data, data)
    for name, content in CONTENTS[data]():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(content)
    return place


def _text() -> Iterator[Tuple[str, bytes]]:
    yield "train/unsup/0_0.txt", b"not labelled"
    yield "train/urls_neg.txt", b"not a review"
    yield from reviews().items()


def _retrieval() -> Iterator[Tuple[str, bytes]]:
    for split, rows in pairs().items():
        yield f"new_aan_pairs.{split}.tsv", b"".join(b"\t".join(row) + b"\n" for row in rows)


def _listops() -> Iterator[Tuple[str, bytes]]:
    for split, found in trees().items():
        rows = [f"{with_parentheses(iter(tree.symbols))}\t{tree.value}" for tree in found]
        yield f"basic_{split}.tsv", "".join(f"{row}\r\n" for row in ["Source\tTarget", *rows]).encode()


def _image() -> Iterator[Tuple[str, bytes]]:
    for name, (pixels, labels) in batches().items():
        yield name, batch(pixels, labels)
    yield "batches.meta", b"not read"


def _speech() -> Iterator[Tuple[str, bytes]]:
    yield "bed/0000_nohash_0.wav", b"another word"
    for name, samples in clips().items():
        yield name, wav(samples.tobytes())


def _pathfinder() -> Iterator[Tuple[str, bytes]]:
    lines: Dict[str, List[str]] = {}
    for name, (pixels, label) in pictures().items():
        imgs, folder, file = name.split("/")
        yield f"curv_contour_length_14/{name}", picture(pixels)
        lines.setdefault(folder, []).append(f"{imgs}/{folder} {file} {len(lines)} {label} 0.1 1 14\n")
    for folder, its in lines.items():
        yield f"curv_contour_length_14/metadata/{folder}.npy", "".join(its).encode()


CONTENTS = {
    "text": _text,
    "retrieval": _retrieval,
    "listops": _listops,
    "image": _image,
    "speech": _speech,
    "pathfinder": _pathfinder,
}


def archive(folder: Path, prefix: str) -> Path:
    """A .tar.gz archive of the folder, whose names begin with the prefix."""
    path = folder.with_suffix(".tar.gz")
    with tarfile.open(path, "w:gz") as file:
        file.add(folder, prefix)
    return path


def wav(content: bytes, bits: int = 16, channels: int = 1, rate: int = 16_000) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as clip:
        clip.setparams((channels, bits // 8, rate, 0, "NONE", ""))
        clip.writeframes(content)
    return file.getvalue()


def picture(pixels: np.ndarray, kind: str = "PNG") -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


class _OldPickler(pickle._Pickler):  # type: ignore[misc]
    """Writes text as Python 2 wrote `str`, and arrays under the names of numpy 1."""

    def save(self, content: Any, *words: Any, **options: Any) -> None:
        if isinstance(content, (bytes, str)):
            code = content if isinstance(content, bytes) else content.encode()
            self.write(pickle.BINSTRING + len(code).to_bytes(4, "little") + code)
        else:
            super().save(content, *words, **options)

    def save_global(self, content: Any, name: Any = None) -> None:
        module = "numpy.core.multiarray" if content.__name__ == "_reconstruct" else content.__module__
        self.write(pickle.GLOBAL + f"{module}\n{content.__name__}\n".encode())

    dispatch = {**pickle._Pickler.dispatch, type: save_global, type(len): save_global}  # type: ignore[attr-defined]


def batch(pixels: np.ndarray, labels: List[int]) -> bytes:
    """A batch of CIFAR-10, as Python 2 pickled it."""
    file = io.BytesIO()
    content = {"batch_label": "a batch", "labels": labels, "data": pixels, "filenames": ["a.png"] * len(labels)}
    _OldPickler(file, protocol=2).dump(content)
    pickletools.dis(file.getvalue(), io.StringIO())  # raises if this is not a pickle
    return file.getvalue()
