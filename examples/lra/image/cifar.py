"""Grey images of 32 x 32 pixels (CIFAR-10), with the published split.

cifar.py cifar-10-batches-py OUT
"""

import io
import operator
import pickle
from pathlib import Path
from typing import Any, List, Tuple

import numpy as np
from torch import Generator
from torch.utils.data import random_split

from mega_fairseq.cli import UserError
from mega_fairseq.cli.prepare import SPLITS, draw_examples, new_folder, run_program, write_arrays

LABELS = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
BATCHES = ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch")
IMAGES = 10_000  # in each batch
HELD_OUT = 5_000
PIXELS = 32 * 32
RED, GREEN, BLUE = 19595, 38470, 7471  # of 65,536: Pillow's weights


def grey(pixels: np.ndarray) -> np.ndarray:
    """(N, 3 L) bytes, all red ones first, to (N, L)."""
    red, green, blue = np.split(pixels.astype(np.uint32), 3, axis=1)
    return ((RED * red + GREEN * green + BLUE * blue + (1 << 15)) >> 16).astype(np.uint8)


class PlainArray:
    """Stands in for numpy's classes and functions, and only keeps what the file says."""

    def __init__(self, *arguments: Any):
        self.arguments, self.state = arguments, ()

    def __setstate__(self, state: Any) -> None:
        self.state = state


class Unpickler(pickle._Unpickler):
    """Executes no code of the file. In Python, since C's allocates memory for any number that a file names."""

    dispatch = {code: load for code, load in pickle._Unpickler.dispatch.items() if code != pickle.BYTEARRAY8[0]}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in (("numpy.core.multiarray", "_reconstruct"), ("numpy", "ndarray"), ("numpy", "dtype")):
            return PlainArray
        raise pickle.UnpicklingError(f"asks for {module}.{name}, which was not executed")


def batch(path: Path) -> Tuple[np.ndarray, List[int]]:
    """The pixels (N, 3 L) and the numbers of the classes."""
    try:
        content = Unpickler(io.BytesIO(path.read_bytes()), encoding="latin1").load()
        _, shape, dtype, by_columns, pixels = content["data"].state
        labels = [operator.index(label) for label in content["labels"]]
        if dtype.arguments[0] != "u1" or by_columns or shape != (IMAGES, 3 * PIXELS) or len(labels) != IMAGES:
            raise ValueError(f"not {IMAGES:,} images of 3 x {PIXELS:,} bytes")
        if not set(labels) <= set(range(len(LABELS))):
            raise ValueError("a label is not 0 to 9")
        return np.frombuffer(pixels.encode("latin1"), np.uint8).reshape(shape), labels
    except Exception as error:  # a damaged pickle can raise any
        raise UserError(f"{path} is not a batch of CIFAR-10 ({error}); give the folder cifar-10-batches-py") from None


def main(source: Path, out: Path) -> None:
    batches = [batch(source / name) for name in BATCHES]
    pixels, labels = np.concatenate([each for each, _ in batches]), sum((each for _, each in batches), [])
    if len({each.tobytes() for each, _ in batches}) < len(BATCHES):
        raise UserError(f"two batches in {source} have the same images; get them again")
    training = len(labels) - IMAGES
    members = np.full(len(labels), SPLITS.index("test"))
    published = Generator().manual_seed(42)  # as in the code of the paper
    for split, part in enumerate(random_split(range(training), (training - HELD_OUT, HELD_OUT), published)):
        members[part.indices] = split
    with new_folder(str(out)) as folder:
        write_arrays(folder, grey(pixels), labels, members, LABELS)
        draw_examples(folder)


if __name__ == "__main__":
    run_program(__doc__, main)
