"""`mega-fairseq prepare`: data for --task mega_classification, from your pictures or from scikit-learn's digits.

`cli/documents/sources.py` prepares documents. The recipes of examples/ prepare other data with the same functions, and
`run_program`.
"""

import argparse
import contextlib
import os
import shutil
import sys
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any, Callable, Dict, Iterable, Iterator, List, NamedTuple, Sequence, Tuple

import numpy as np
from tqdm import tqdm

from mega_fairseq.cli import UserError
from mega_fairseq.cli.output import plain, write_figure
from mega_fairseq.cli.workers import in_order

SPLITS = ("train", "valid", "test")
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")  # others, such as EPS, start other programs
LONGEST_SIDE = 4096  # pixels; a model reads them one by one
SHOWN = (2, 8)  # rows and columns of examples.png


class Images(NamedTuple):
    """Square images, each with the number of its class."""

    classes: List[str]
    labels: List[int]
    pixels: Iterable[np.ndarray]  # (side * side,) bytes for each label, in order
    held_out: int  # images for validation, and as many for the test


def run(arguments: argparse.Namespace) -> None:
    out = arguments.out
    if arguments.data == "digits":
        images = digits()
    else:
        images = pictures(arguments.source, arguments.side, arguments.workers)
        if os.path.realpath(out).startswith(os.path.join(os.path.realpath(arguments.source), "")):
            raise UserError(f"{out} is within the folder of the pictures; choose another folder")
    counts = len(images.labels) - 2 * images.held_out, images.held_out, images.held_out
    members = stratified(images.labels, counts, f"{arguments.data} {arguments.seed}")
    with new_folder(out) as folder:
        sizes = write_arrays(folder, images.pixels, images.labels, members, images.classes)
        draw_examples(folder)
    print(f"wrote {sizes} to {out}")
    if arguments.data == "pictures":
        values = np.load(os.path.join(out, "train.npy"), mmap_mode="r")
        print(f"train with --values-mean {values.mean() / 255:.3f} --values-deviation {values.std() / 255:.3f}")


# ------------------------------------------------------------------------------------------- digits


def digits() -> Images:
    """Handwritten digits of 8 x 8 pixels."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise UserError("scikit-learn, which has the images, is missing; run `pip install scikit-learn`") from None
    intensities, labels = load_digits(return_X_y=True)  # 0 to 16
    return Images(list(map(str, range(10))), labels.tolist(), (15 * intensities).astype(np.uint8), held_out=200)


# ----------------------------------------------------------------------------------------- pictures


def pictures(source: str, side: int, workers: int) -> Images:
    """The pictures of a folder with a folder for each label, as grey squares. Hidden files are left out."""
    if not 1 <= side <= LONGEST_SIDE:
        raise UserError(f"--side is {side}; give a whole number from 1 to {LONGEST_SIDE:,}")
    if workers < 1:
        raise UserError(f"--workers is {workers}; give a whole number of at least 1")
    try:
        import PIL.Image  # noqa: F401 - the workers need it
    except ImportError:
        raise UserError("Pillow, which reads the pictures, is missing; run `pip install pillow`") from None
    files = pictures_by_label(source)
    labels = [number for number, paths in enumerate(files.values()) for _ in paths]
    pixels = in_order(partial(grey_square, side), chain.from_iterable(files.values()), workers)
    return Images(list(files), labels, pixels, held_out=max(1, len(labels) // 10))


def pictures_by_label(source: str) -> Dict[str, List[str]]:
    """The paths of each label's pictures, sorted."""
    if not os.path.isdir(source):
        raise UserError(f"{source} is not a folder; give a folder with a folder of pictures for each label")
    labels, outside = _entries(source)
    if len(labels) < 2:
        raise UserError(f"{source} contains {len(labels)} folders; give one for each label, at least 2")
    if outside:
        print(f"files outside of the labels' folders were left out: {len(outside):,}, first {outside[0]}")
    files = {}
    for place in labels:
        label = os.path.basename(place)
        if label.split() != [label] or not label.isprintable():
            raise UserError(f"the folder's name {label!r}, the label, is not one word of printable text; rename it")
        folders, files[label] = _entries(place)
        if folders:
            raise UserError(f"{folders[0]} is a folder within a label's folder; move its pictures to {place}, or away")
        if len(files[label]) < 3:
            raise UserError(f"{place} contains {len(files[label])} pictures; give at least 3, one for each split")
    return files


def _entries(folder: str) -> Tuple[List[str], List[str]]:
    """The paths of folders and of files, sorted."""
    paths = [os.path.join(folder, name) for name in sorted(os.listdir(folder)) if not name.startswith(".")]
    special = [path for path in paths if not (os.path.isdir(path) or os.path.isfile(path))]
    if special:
        raise UserError(f"{special[0]} is a broken link or a special file; remove it")
    return list(filter(os.path.isdir, paths)), list(filter(os.path.isfile, paths))


def grey_square(side: int, path: str) -> np.ndarray:
    """(side * side,) bytes: upright, on white where it is transparent, with both sides scaled to this length."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with Image.open(path, formats=FORMATS) as image:
            if getattr(image, "is_animated", False) and image.format != "MPO":  # cameras' JPEG, with a preview
                raise ValueError("it has several frames")
            upright = ImageOps.exif_transpose(image)
            if upright.mode.startswith(("I", "F")):
                raise ValueError("it has more than 8 bits a channel")
            coloured = upright.convert("RGBA")
            paper = Image.new("RGBA", coloured.size, "white")
            paper.alpha_composite(coloured)
            return np.asarray(paper.convert("L").resize((side, side), Image.BILINEAR)).ravel()
    except UnidentifiedImageError:
        raise UserError(f"{path} is damaged or none of {', '.join(FORMATS)}; convert or remove it") from None
    except Exception as error:  # Pillow raises many kinds for damaged files
        raise UserError(f"{path} cannot be read as a picture ({error}); convert or remove it") from None


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
        raise UserError(
            f"{path} was not written ({error.strerror}); free some space, or choose another folder"
        ) from None
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
