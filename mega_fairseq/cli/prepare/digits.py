"""`mega-fairseq prepare digits`: which digit does a picture of 8 x 8 pixels show? (handwritten, of scikit-learn)"""

import argparse
from typing import Dict

import numpy as np

from mega_fairseq.cli import UserError
from mega_fairseq.cli.prepare.arrays import finish, row_type
from mega_fairseq.cli.prepare.folder import Folder
from mega_fairseq.cli.prepare.splits import stratified

SIDE = 8
ROW = row_type("u1", SIDE * SIDE)
LABELS = tuple(map(str, range(10)))
HELD_OUT = 200  # images, each to validate and test
SCALE = 15  # intensities are 0 to 16


def settings(arguments: argparse.Namespace) -> Dict[str, int]:
    return {"seed": arguments.seed}


def prepare(arguments: argparse.Namespace, folder: Folder) -> None:
    rows = digits()
    folder.make(lambda _: rows.tobytes(), ["all"], 1, len(rows))
    sizes = (len(rows) - 2 * HELD_OUT, HELD_OUT, HELD_OUT)
    finish(folder, ROW, stratified(rows["label"].tolist(), sizes, f"digits {arguments.seed}"), LABELS)


def digits() -> np.ndarray:
    """All images as rows."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise UserError("scikit-learn, which has the images, is missing; run `pip install scikit-learn`") from None
    pixels, labels = load_digits(return_X_y=True)
    rows = np.empty(len(labels), ROW)
    rows["label"], rows["values"] = labels, SCALE * pixels
    return rows
