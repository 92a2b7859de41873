"""`mega-fairseq prepare pathfinder` from the published pictures instead of the generator."""

import argparse
import os
from functools import partial
from typing import Any, Dict, List, Sequence, Tuple

import numpy as np

from mega_fairseq.cli import UserError
from mega_fairseq.cli.prepare.arrays import finish, need_pillow, row_type
from mega_fairseq.cli.prepare.folder import Folder, batches
from mega_fairseq.cli.prepare.pathfinder import LABELS
from mega_fairseq.cli.prepare.splits import published

HARD = "curv_contour_length_14"
IMAGES = 200_000
PART = 500  # images
REMEDY = f"give the folder pathfinder32 or pathfinder128 of the archive lra_release.gz, which contains {HARD}"

Picture = Tuple[str, int]  # path and label


def settings(arguments: argparse.Namespace) -> Dict[str, Any]:
    return {}


def prepare(arguments: argparse.Namespace, folder: Folder) -> None:
    need_pillow()
    found = pictures(os.path.join(arguments.source, HARD))
    if len(found) != IMAGES:
        raise UserError(f"{arguments.source} has {len(found):,} pictures instead of {IMAGES:,}; {REMEDY}")
    side = len(read(found[0][0]))
    folder.make(partial(make_part, side), batches(found, PART), arguments.workers, PART)
    tenth = IMAGES // 10
    finish(folder, row_type("u1", side * side), published((IMAGES - 2 * tenth, tenth, tenth)), LABELS)


def pictures(path: str) -> List[Picture]:
    """All pictures in the published order: the files of metadata by their numbers, each from top to bottom."""
    lines = []
    metadata = os.path.join(path, "metadata")
    try:
        for name in sorted(os.listdir(metadata), key=lambda name: int(os.path.splitext(name)[0])):
            with open(os.path.join(metadata, name)) as file:  # text, in spite of the ending .npy
                lines += [(name, line.split()) for line in file]
    except (OSError, ValueError):
        raise UserError(f"{metadata} has no files 1.npy, 2.npy and so on that are text; {REMEDY}") from None
    for name, words in lines:
        if len(words) < 4 or words[3] not in LABELS:
            raise UserError(f"{metadata}/{name} has a line without a label 0 or 1 in column 4; {REMEDY}")
    return [(os.path.join(path, *words[:2]), int(words[3])) for _, words in lines]


def make_part(side: int, found: Sequence[Picture]) -> bytes:
    rows = []
    for path, label in found:
        image = read(path)
        if image.shape != (side, side):
            raise UserError(
                f"{path} has {image.shape[0]} x {image.shape[1]} pixels instead of {side} x {side}; {REMEDY}"
            )
        rows += [bytes([label]), image.tobytes()]
    return b"".join(rows)


def read(path: str) -> np.ndarray:
    from PIL import Image

    try:
        if not os.path.isfile(path):
            raise FileNotFoundError
        with Image.open(path, formats=["PNG"]) as image:  # other formats may start other programs
            pixels = np.asarray(image.convert("L"))
    except Exception:  # Pillow raises many kinds for damaged files
        pixels = np.zeros((1, 1))
    if not pixels.any():
        raise UserError(f"{path} is missing, empty or damaged; {REMEDY}")
    return pixels
