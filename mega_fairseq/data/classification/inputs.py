"""The inputs of classification examples: tokens, bytes or real numbers, in memory-mapped files where possible."""

import math
import os
from pathlib import Path
from pickle import UnpicklingError
from typing import Dict, List, Optional, Sequence

import numpy as np
import torch
from fairseq.data import Dictionary
from torch import Tensor

from mega_fairseq.data.corpus import Corpus, borders

BLOCK = 2**24  # numbers checked at a time


class Inputs(Sequence[Tensor]):
    """One-dimensional inputs, each a tensor, with their lengths. `source` is what an error names."""

    number_type: Optional[str] = None  # of values, as in Scaling

    def __init__(self, source: str, sizes: np.ndarray):
        self.source, self.sizes = source, sizes

    def __len__(self) -> int:
        return len(self.sizes)


class InMemory(Inputs):
    """Inputs in memory."""

    def __init__(self, rows: Sequence[Tensor]):
        super().__init__("the list", np.array([len(row) for row in rows]))
        self.rows = rows

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]


# ----------------------------------------------------------------------------------- tokens and bytes


class Tokens(Inputs):
    """The lines that fairseq-preprocess wrote to `path`.bin and `path`.idx, with eos."""

    def __init__(self, path: Path, dictionary: Dictionary):
        self.corpus = Corpus.load(str(path), dictionary)
        super().__init__(f"{path}.bin", self.corpus.lines)
        self.starts = borders(self.sizes)
        _refuse_empty(self.source, self.sizes - 1)

    def __getitem__(self, index: int) -> Tensor:
        return self.corpus.read(int(self.starts[index]), int(self.starts[index + 1]))


def byte_dictionary() -> Dictionary:
    """The fixed dictionary of bytes; the symbol of a byte is its number."""
    dictionary = Dictionary()
    for byte in range(256):
        dictionary.add_symbol(str(byte))
    return dictionary


def tokens_of_bytes(line: np.ndarray, dictionary: Dictionary) -> Tensor:
    """Bytes (L,) -> their tokens and eos (L + 1,)."""
    return torch.from_numpy(np.append(line.astype(np.int64) + dictionary.nspecial, dictionary.eos()))


class ByteLines(Inputs):
    """The lines of a file as bytes, with eos in place of the end of the line."""

    def __init__(self, path: Path, dictionary: Dictionary):
        if not os.path.getsize(path):
            raise ValueError(f"{path} is empty; give one input in each line")
        self.content, self.dictionary = np.memmap(path, np.uint8, "r"), dictionary
        ends = _line_ends(self.content)
        self.starts = np.append(0, ends[:-1] + 1)
        returns = (self.content[np.maximum(ends - 1, 0)] == ord("\r")) & (ends > self.starts)
        self.ends = ends - returns  # lines may end as on Windows
        super().__init__(str(path), self.ends - self.starts + 1)
        _refuse_empty(self.source, self.sizes - 1)

    def __getitem__(self, index: int) -> Tensor:
        return tokens_of_bytes(self.content[self.starts[index] : self.ends[index]], self.dictionary)


def _line_ends(content: np.ndarray) -> np.ndarray:
    """The position behind each line, where its newline or the end of the file is."""
    blocks = range(0, len(content), BLOCK)
    ends = np.concatenate([start + np.flatnonzero(content[start : start + BLOCK] == ord("\n")) for start in blocks])
    return ends if content[-1] == ord("\n") else np.append(ends, len(content))


def _refuse_empty(source: str, lengths: np.ndarray) -> None:
    if (lengths == 0).any():
        raise ValueError(f"{source} has an empty input in line {int(np.argmin(lengths)) + 1}; remove it and its label")


# ------------------------------------------------------------------------------------------ numbers


class Scaling:
    """Numbers of a file -> (x - mean) / deviation; x is in [0, 1] for bytes and in [-1, 1) for 16-bit integers."""

    SCALES: Dict[str, float] = {"uint8": 255.0, "int16": 32768.0, "float16": 1.0, "float32": 1.0, "float64": 1.0}
    NUMBER_TYPES = ("uint8", "int16", "float")  # numbers of the same type have the same scale

    def __init__(self, mean: float, deviation: float):
        if not 0 < deviation < math.inf:
            raise ValueError(f"--values-deviation is {deviation}; give a number above 0")
        if not math.isfinite(mean):
            raise ValueError(f"--values-mean is {mean}; give a number")
        self.mean, self.deviation = mean, deviation

    @staticmethod
    def number_type(numbers: np.ndarray) -> str:
        """One of NUMBER_TYPES."""
        return "float" if numbers.dtype.kind == "f" else numbers.dtype.name

    def checked(self, numbers: np.ndarray, source: str) -> Tensor:
        """One input (L,), if it can be scaled."""
        if numbers.ndim != 1 or numbers.dtype.name not in self.SCALES or not _finite(numbers).all():
            raise ValueError(
                f"{source} has the shape {numbers.shape} and type {numbers.dtype}; give one row of finite numbers of "
                f"type {', '.join(self.SCALES)}"
            )
        return self(numbers)

    def __call__(self, numbers: np.ndarray) -> Tensor:
        x = torch.from_numpy(numbers.astype(np.float32)) / self.SCALES[numbers.dtype.name]
        return (x - self.mean) / self.deviation


def _finite(numbers: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return np.isfinite(numbers.astype(np.float32))


class Numbers(Inputs):
    """The rows of an array (examples, length)."""

    def __init__(self, path: Path, numbers: np.ndarray, scaling: Scaling):
        if numbers.ndim != 2 or not numbers.size:
            raise ValueError(f"{path} has the shape {numbers.shape}; give (examples, length), neither of them 0")
        if numbers.dtype.name not in scaling.SCALES:
            raise ValueError(f"{path} has numbers of type {numbers.dtype}; give one of {', '.join(scaling.SCALES)}")
        if numbers.dtype.kind == "f":
            _refuse_nan(path, numbers)
        super().__init__(str(path), np.full(len(numbers), numbers.shape[1]))
        self.numbers, self.scaling, self.number_type = numbers, scaling, scaling.number_type(numbers)

    def __getitem__(self, index: int) -> Tensor:
        return self.scaling(self.numbers[index])


def _refuse_nan(path: Path, numbers: np.ndarray) -> None:
    rows = max(1, BLOCK // numbers.shape[1])
    for start in range(0, len(numbers), rows):
        finite = _finite(numbers[start : start + rows]).all(1)
        if not finite.all():
            number = start + int(np.argmin(finite)) + 1
            raise ValueError(f"{path} has NaN or an infinite number in example {number}; correct or remove it")


# ------------------------------------------------------------------------------------ files of numbers


def array(path: Path) -> np.ndarray:
    """The array in a .npy file, memory-mapped."""
    try:
        content = np.load(path, mmap_mode="r", allow_pickle=False)
    except (EOFError, ValueError) as error:  # does not name the file
        raise ValueError(f"{path} is not a complete array of numbers ({error})") from None
    if not isinstance(content, np.ndarray):
        raise ValueError(f"{path} is an archive of arrays; give one array")
    return content


def released_speech(path: Path) -> np.ndarray:
    """A tensor (examples, 1, length) that torch saved -> (examples, length)."""
    stored = _tensor(path)
    if stored.dim() != 3 or stored.size(1) != 1:
        raise ValueError(f"{path} has the shape {tuple(stored.shape)}; give (examples, 1, samples)")
    return stored[:, 0].numpy()


def released_labels(path: Path) -> List[str]:
    """A tensor (examples,) of class numbers that torch saved."""
    stored = _tensor(path)
    if stored.dim() != 1 or stored.dtype not in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64):
        raise ValueError(f"{path} has the shape {tuple(stored.shape)} and {stored.dtype}; give one integer an example")
    return [str(number) for number in stored.tolist()]


def released_images(path: Path) -> np.ndarray:
    """Text with one image in a line: integers from 0 to 255 -> (examples, length)."""
    try:
        return np.loadtxt(path, np.uint8, comments=None, ndmin=2)
    except ValueError as error:
        raise ValueError(f"{path} has lines that are not images, integers from 0 to 255 ({error})") from None


def _tensor(path: Path) -> Tensor:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (EOFError, OSError, RuntimeError, UnpicklingError) as error:
        raise ValueError(f"{path} is not a complete tensor ({type(error).__name__}); copy it again") from None
