"""`mega-fairseq prepare image`: what does a grey image of 32 x 32 pixels show? (CIFAR-10)"""

import argparse
import io
import operator
import pickle
from functools import partial
from os.path import basename
from pathlib import Path
from typing import Any, Dict, List

import numpy as np

from mega_fairseq.cli import UserError
from mega_fairseq.cli.prepare.arrays import finish, row_type
from mega_fairseq.cli.prepare.folder import Folder
from mega_fairseq.cli.prepare.source import Place, Source
from mega_fairseq.cli.prepare.splits import published

SOURCE = Source("cifar-10-batches-py", "cifar-10-python.tar.gz")
LABELS = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
BATCHES = ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch")
IMAGES = 10_000  # in each batch
HELD_OUT = 5_000
SIDE = 32
RED, GREEN, BLUE = 19595, 38470, 7471  # of 65,536: Pillow's weights


def settings(arguments: argparse.Namespace) -> Dict[str, Any]:
    return {}


def prepare(arguments: argparse.Namespace, folder: Folder) -> None:
    places = {basename(place.name): place for place in SOURCE.find(arguments.source, [""], "", folder)[""]}
    missing = [name for name in BATCHES if name not in places]
    if missing:
        raise UserError(f"{arguments.source} has no {', '.join(missing)}; {SOURCE.remedy}")
    batches = [places[name] for name in BATCHES]
    folder.make(partial(make_part, IMAGES), batches, arguments.workers, IMAGES)
    _check_copies(folder, batches)
    train = (len(BATCHES) - 1) * IMAGES
    members = np.append(published((train - HELD_OUT, HELD_OUT)), np.full(IMAGES, 2))
    finish(folder, row_type("u1", SIDE * SIDE), members, LABELS)


def _check_copies(folder: Folder, batches: List[Place]) -> None:
    names: Dict[bytes, str] = {}
    for place, part in zip(batches, folder.parts):
        first = names.setdefault(Path(part).read_bytes(), place.name)
        if first != place.name:
            folder.discard()
            raise UserError(f"{first} and {place.name} have the same images; {SOURCE.remedy}")


def make_part(images: int, place: Place) -> bytes:
    pixels, labels = _batch(place)
    if pixels.shape != (images, 3 * SIDE * SIDE) or len(labels) != images or not set(labels) <= set(range(10)):
        raise UserError(f"{place.name} does not have {images:,} images of 3 x {SIDE} x {SIDE}; {SOURCE.remedy}")
    rows = np.empty(images, row_type("u1", SIDE * SIDE))
    rows["label"], rows["values"] = labels, grey(pixels)
    return rows.tobytes()


def grey(pixels: np.ndarray) -> np.ndarray:
    """(N, 3 L) bytes, all red ones first, to (N, L)."""
    red, green, blue = np.split(pixels.astype(np.uint32), 3, axis=1)
    return ((RED * red + GREEN * green + BLUE * blue + (1 << 15)) >> 16).astype(np.uint8)


# ------------------------------------------------------------------------------------ pickled batches


class _Array:
    """Takes the place of numpy's classes and functions, and only keeps what the file says."""

    def __init__(self, *arguments: Any):
        self.arguments, self.state = arguments, ()

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle._Unpickler):
    """Executes no code of the file. In Python, since C's allocates memory for any number that a file names."""

    dispatch = {code: load for code, load in pickle._Unpickler.dispatch.items() if code != pickle.BYTEARRAY8[0]}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in (("numpy.core.multiarray", "_reconstruct"), ("numpy", "ndarray"), ("numpy", "dtype")):
            return _Array
        raise pickle.UnpicklingError(f"asks for {module}.{name}, which was not executed")


def _batch(place: Place) -> Any:
    """The pixels and the numbers of the classes."""
    try:
        content = _Unpickler(io.BytesIO(place.read()), encoding="latin1").load()
        _, shape, of_bytes, by_columns, pixels = content["data"].state
        if of_bytes.arguments[0] != "u1" or by_columns:
            raise ValueError
        return np.frombuffer(pixels.encode("latin1"), np.uint8).reshape(shape), [
            operator.index(label) for label in content["labels"]
        ]
    except Exception as error:  # a damaged pickle can raise any
        why = f" ({error})" if isinstance(error, pickle.UnpicklingError) else ""
        raise UserError(
            f"{place.name} is not a batch of CIFAR-10, or only a part of one{why}; {SOURCE.remedy}"
        ) from None
