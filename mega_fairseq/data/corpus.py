"""A split of binarised text as one long sequence of tokens, memory-mapped."""

import itertools
import logging
import os
import struct
from typing import Callable, List, Tuple

import numpy as np
import torch
from fairseq.data import Dictionary
from fairseq.data.indexed_dataset import (
    IndexedDataset,
    MMapIndexedDataset,
    data_file_path,
    index_file_path,
    infer_dataset_impl,
)
from torch import Tensor

logger = logging.getLogger(__name__)
DOCUMENTS = ("stream", "line", "blank")
BLOCK = 2**24  # tokens checked at a time


class Corpus:
    """Tokens that fairseq-preprocess wrote, with line lengths; parts (train, train1, ...) are concatenated."""

    def __init__(self, parts: List[np.ndarray], lines: np.ndarray):
        self.parts = parts
        self.lines = lines.astype(np.int64, copy=False)  # tokens of each line
        self.starts = np.cumsum([0, *(part.size for part in parts)])  # start of each part, and the end

    @classmethod
    def load(cls, path: str, dictionary: Dictionary, combine: bool = False) -> "Corpus":
        """Load `path`.bin and `path`.idx, and with `combine` also the parts `path`1, `path`2, ..."""
        if not MMapIndexedDataset.exists(path):
            raise FileNotFoundError(
                f"there is no {path}.bin and {path}.idx; give the folder that fairseq-preprocess wrote (--destdir), "
                "and one split of it"
            )
        parts, lines = [], []
        for name in part_paths(path, combine, MMapIndexedDataset.exists):
            tokens, sizes = _read(name)
            if tokens.size != sizes.sum():
                raise ValueError(
                    f"{name}.bin has {tokens.size:,} tokens and {name}.idx lists {sizes.sum():,}: "
                    "one of them is damaged; run fairseq-preprocess again"
                )
            _check_types(name, tokens, dictionary)
            parts.append(tokens)
            lines.append(sizes)
        corpus = cls(parts, np.concatenate(lines))
        if not len(corpus):
            raise ValueError(f"{path}.bin contains no tokens; check the text given to fairseq-preprocess")
        return corpus

    def __len__(self) -> int:
        return int(self.starts[-1])

    def read(self, start: int, stop: int) -> Tensor:
        """Return tokens start .. stop - 1."""
        pieces = []
        for part, begin in zip(self.parts, self.starts):
            first, last = max(start - int(begin), 0), min(stop - int(begin), part.size)
            if first < last:
                pieces.append(np.array(part[first:last], dtype=np.int64))  # always a copy
        return torch.from_numpy(pieces[0] if len(pieces) == 1 else np.concatenate(pieces))

    def documents(self, how: str) -> np.ndarray:
        """Return the start of each document, and the end of the last: (documents + 1,)."""
        if how == "stream":
            return np.array([0, len(self)])
        if how == "line":
            return borders(self.lines[self.lines > 0])
        blank = self.lines == 1  # only an end of line, which belongs to the document before it
        if not blank.any():  # to_bytes.py writes the ends of lines as bytes
            logger.warning(
                "no line of a split is blank, so --documents blank does not reset its context; text of bytes "
                "(to_bytes.py) has no blank lines"
            )
        last = blank & ~np.append(blank[1:], False)  # consecutive blank lines are one border
        return np.unique(np.concatenate([[0], np.cumsum(self.lines)[last], [len(self)]]))


def borders(sizes: np.ndarray) -> np.ndarray:
    """The start of each of consecutive parts with these sizes (N,), and the end of the last: (N + 1,)."""
    return np.concatenate([[0], np.cumsum(sizes)])


def load_dictionary(path: str) -> Dictionary:
    try:
        return Dictionary.load(path)
    except Exception as error:  # fairseq raises anything for damaged files
        raise ValueError(f"{path} cannot be read ({error}); give a folder that fairseq-preprocess wrote") from None


def _check_types(name: str, tokens: np.ndarray, dictionary: Dictionary) -> None:
    """Refuse types that the dictionary does not have, and the padding symbol."""
    pad, largest = dictionary.pad(), 0
    for start in range(0, tokens.size, BLOCK):
        block = tokens[start : start + BLOCK]
        largest = max(largest, int(block.max()))
        if (block == pad).any():
            raise ValueError(
                f"{name}.bin contains {dictionary[pad]}, which fairseq uses for padding; "
                "remove that word from the text and run fairseq-preprocess again"
            )
    if largest >= len(dictionary):
        raise ValueError(
            f"{name}.bin has type {largest} and dict.txt only {len(dictionary)} types: "
            "they do not match; run fairseq-preprocess again, or copy the right dict.txt next to it"
        )


def part_paths(path: str, combine: bool, exists: Callable[[str], bool]) -> List[str]:
    """Return `path`, and with `combine` also path1, path2, ... if they exist, which is how fairseq names parts."""
    others = (f"{path}{number}" for number in itertools.count(1))
    return [path, *itertools.takewhile(exists, others if combine else ())]


def _read(name: str) -> Tuple[np.ndarray, np.ndarray]:
    """Return all tokens of one part, memory-mapped if its format allows, and the sizes of its lines."""
    data, index = data_file_path(name), index_file_path(name)
    try:
        if infer_dataset_impl(name) == "cached":
            older = IndexedDataset(name)
            return np.fromfile(data, older.dtype) - 1, older.sizes  # this format counts types from 1
        table = MMapIndexedDataset.Index(index)
        sizes, dtype = np.array(table.sizes, dtype=np.int64), table.dtype
    except (AssertionError, KeyError, ValueError, struct.error):
        raise ValueError(f"{index} is damaged or not fairseq's; run fairseq-preprocess again") from None
    whole = os.path.getsize(data) // np.dtype(dtype).itemsize
    return (np.memmap(data, dtype, "r", shape=(whole,)) if whole else np.empty(0, dtype)), sizes
