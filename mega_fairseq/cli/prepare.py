"""`mega-fairseq prepare digits`: data for --task mega_classification.

`cli/documents/sources.py` prepares documents. The recipes of examples/ prepare other data with the same functions, and
`run_program`.
"""

import argparse
import contextlib
import os
import shutil
import sys
from concurrent.futures.process import BrokenProcessPool
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any, Callable, Iterable, Iterator, Sequence

import numpy as np
from tqdm import tqdm

from mega_fairseq.cli import UserError
from mega_fairseq.cli.output import not_written, plain, write_figure

SPLITS = ("train", "valid", "test")
HELD_OUT = 200  # digits for validation, and as many for the test
SHOWN = (2, 8)  # rows and columns of examples.png


def run(arguments: argparse.Namespace) -> None:
    """Handwritten digits of 8 x 8 pixels."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise UserError("scikit-learn, which has the images, is missing; run `pip install scikit-learn`") from None
    intensities, labels = load_digits(return_X_y=True)  # 0 to 16
    counts = len(labels) - 2 * HELD_OUT, HELD_OUT, HELD_OUT
    members = stratified(labels.tolist(), counts, f"digits {arguments.seed}")
    with new_folder(arguments.out) as folder:
        classes = list(map(str, range(10)))
        sizes = write_arrays(folder, (15 * intensities).astype(np.uint8), labels.tolist(), members, classes)
        draw_examples(folder)
    print(f"wrote {sizes} to {arguments.out}")


# ------------------------------------------------------------------------------------------- splits


def stratified(labels: Sequence[int], sizes: Sequence[int], name: str) -> np.ndarray:
    """The split of each example, 0 (train), 1 (valid) or 2 (test): random, with equal shares of all labels in each.

    `sizes` are the numbers of examples in the splits; `name` seeds the random numbers.
    """
    random, ties, places = Random(name), Random(f"{name} ties"), []
    for label in sorted(set(labels)):
        examples = [example for example, its in enumerate(labels) if its == label]
        random.shuffle(examples)
        places += [((rank + 0.5) / len(examples), ties.random(), example) for rank, example in enumerate(examples)]
    members = np.empty(sum(sizes), dtype=np.uint8)
    members[[example for *_, example in sorted(places)]] = np.repeat(np.arange(len(sizes), dtype=np.uint8), sizes)
    return members


# -------------------------------------------------------------------------------------------- files


@contextlib.contextmanager
def new_folder(path: str) -> Iterator[str]:
    """A temporary folder, which is renamed to `path` once it is complete."""
    if os.path.lexists(path) and not (os.path.isdir(path) and not os.listdir(path)):
        raise UserError(f"{path} exists and is not an empty folder; give a new folder, or remove this one")
    temporary = f"{os.path.normpath(path)}.{os.getpid()}.tmp"
    try:
        os.makedirs(temporary)
        yield temporary
        os.replace(temporary, path)
    except BrokenProcessPool:
        raise UserError("a worker was killed, perhaps for lack of memory; give fewer --workers") from None
    except OSError as error:
        raise not_written(path, error) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_arrays(
    folder: str, rows: Iterable[np.ndarray], labels: Sequence[int], members: np.ndarray, classes: Sequence[str]
) -> str:
    """Write train.npy and train.label, the same for the other splits, and labels.txt; return the sizes, as text.

    `labels` has the class of each row and `members` the number of its split. Rows may be made while they are written.
    """
    rows = iter(tqdm(rows, total=len(labels), unit="example", disable=None))
    first = next(rows)
    with contextlib.ExitStack() as files:
        arrays = [files.enter_context(open(os.path.join(folder, f"{split}.npy"), "wb")) for split in SPLITS]
        for number, file in enumerate(arrays):
            shape = (int((members == number).sum()), *first.shape)
            header = {"descr": first.dtype.str, "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(file, header)
        for row, member in zip(chain([first], rows), members):
            arrays[member].write(row.tobytes())
    for number, split in enumerate(SPLITS):
        chosen = (classes[label] for label, member in zip(labels, members) if member == number)
        write_lines(os.path.join(folder, f"{split}.label"), chosen)
    write_lines(os.path.join(folder, "labels.txt"), classes)
    return ", ".join(f"{split} ({(members == number).sum():,})" for number, split in enumerate(SPLITS))


def write_lines(path: str, lines: Iterable[str]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in lines)


def draw_examples(folder: str) -> None:
    """Draw examples.png, a grid of the first training images with their labels, if matplotlib is installed."""

    def draw() -> Any:
        from matplotlib.figure import Figure

        images = np.load(os.path.join(folder, "train.npy"), mmap_mode="r")
        with open(os.path.join(folder, "train.label"), encoding="utf-8") as file:
            labels = file.read().split()
        figure = Figure(figsize=(8, 2.3), layout="constrained")
        for axis, image, label in zip(figure.subplots(*SHOWN).flat, images, labels):
            axis.imshow(image.reshape(round(len(image) ** 0.5), -1), cmap="gray")
            axis.set_title(plain(label), fontsize=8, pad=2)
        for axis in figure.axes:
            axis.axis("off")
        return figure

    write_figure(os.path.join(folder, "examples.png"), draw)


# ----------------------------------------------------------------------------------------- programs


def run_program(usage: str, main: Callable[[Path, Path], None]) -> None:
    """Run `main(source, out)` with the arguments of the command line."""
    if len(sys.argv) != 3:
        sys.exit(usage)
    try:
        main(*map(Path, sys.argv[1:]))
    except UserError as error:
        sys.exit(f"error: {error}.")
