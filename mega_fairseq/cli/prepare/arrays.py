"""Rows of numbers with a label each: parts of a folder, and the .npy and .label files made of them."""

import io
import math
import os
from typing import Any, Dict, Iterable, Iterator, Sequence

import numpy as np

from mega_fairseq.cli import UserError
from mega_fairseq.cli.output import plain
from mega_fairseq.cli.prepare.folder import SPLITS, Folder


def row_type(values: str, length: int) -> np.dtype:
    """A row of a part: the number of the label, then the values of this type."""
    return np.dtype([("label", "u1"), ("values", values, (length,))])


def finish(folder: Folder, form: np.dtype, members: np.ndarray, labels: Sequence[str]) -> None:
    """Write the files of each split; `members` has the number of the split for each row."""
    files: Dict[str, Iterable[bytes]] = {}
    sizes = {split: int((members == number).sum()) for number, split in enumerate(SPLITS)}
    for number, split in enumerate(SPLITS):
        files[f"{split}.label"] = _label_lines(_rows(folder, form, members, number), labels)
        files[f"{split}.npy"] = _array(_rows(folder, form, members, number), form, sizes[split])
    folder.finish({**files, "labels.txt": [f"{label}\n".encode() for label in labels]}, sizes)


def _rows(folder: Folder, form: np.dtype, members: np.ndarray, split: int) -> Iterator[np.ndarray]:
    """The rows of a split, part by part."""
    start = 0
    for path in folder.parts:
        count = os.path.getsize(path) // form.itemsize
        chosen = np.flatnonzero(members[start : start + count] == split)
        if len(chosen):
            yield np.fromfile(path, form)[chosen]
        start += count


def _label_lines(parts: Iterable[np.ndarray], labels: Sequence[str]) -> Iterator[bytes]:
    for rows in parts:
        yield "".join(f"{labels[label]}\n" for label in rows["label"]).encode()


def _array(parts: Iterable[np.ndarray], form: np.dtype, count: int) -> Iterator[bytes]:
    """The content of a .npy file."""
    values, shape = form["values"].subdtype
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": values.str, "fortran_order": False, "shape": (count, *shape)}
    )
    yield header.getvalue()
    for rows in parts:
        yield rows["values"].tobytes()


def need_pillow() -> None:
    try:
        import PIL.Image  # noqa: F401 - the workers need it
    except ImportError:
        raise UserError("Pillow, which reads the pictures, is missing; run `pip install pillow`") from None


def draw_examples(out: str) -> Any:
    """A grid of the first training images with their labels."""
    from matplotlib.figure import Figure

    images = np.load(os.path.join(out, "train.npy"), mmap_mode="r")
    with open(os.path.join(out, "train.label")) as file:
        labels = file.read().split()
    figure = Figure(figsize=(8, 2.3), layout="constrained")
    for axis, image, label in zip(figure.subplots(2, 8).flat, images, labels):
        axis.imshow(image.reshape(math.isqrt(len(image)), -1), cmap="gray")
        axis.set_title(plain(label), fontsize=8, pad=2)
    for axis in figure.axes:
        axis.axis("off")
    return figure
