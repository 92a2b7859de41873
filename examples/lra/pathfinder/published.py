"""The published pictures of Pathfinder or Path-X, with the published split.

    published.py FOLDER OUT

FOLDER is pathfinder32 or pathfinder128 of the archive lra_release.gz; its hard pictures are read.
"""

from pathlib import Path
from typing import List, Tuple

import numpy as np
from torch import Generator
from torch.utils.data import random_split

from mega_fairseq.cli import UserError
from mega_fairseq.cli.prepare import draw_examples, new_folder, run_program, write_arrays

HARD = "curv_contour_length_14"
IMAGES = 200_000
LABELS = ("0", "1")


def pictures(folder: Path) -> List[Tuple[Path, int]]:
    """All pictures with their labels in the published order: that of the numbers of the metadata's files."""
    try:
        files = sorted((folder / "metadata").iterdir(), key=lambda path: int(path.stem))
        lines = [line.split() for path in files for line in path.read_text().splitlines()]  # text, in spite of .npy
        return [(folder / words[0] / words[1], LABELS.index(words[3])) for words in lines]
    except (OSError, LookupError, ValueError) as error:
        raise UserError(
            f"{folder}/metadata has no text files 1.npy and so on with a label 0 or 1 in column 4 ({error}); give the "
            "folder pathfinder32 or pathfinder128"
        ) from None


def read(path: Path) -> np.ndarray:
    """(side, side) bytes."""
    from PIL import Image

    try:
        with Image.open(path, formats=["PNG"]) as image:  # other formats may start other programs
            pixels = np.asarray(image.convert("L"))
    except Exception as error:  # Pillow raises many kinds for damaged files
        raise UserError(f"{path} cannot be read ({error}); get it again") from None
    if not pixels.any():
        raise UserError(f"{path} is black; get it again")
    return pixels


def square(path: Path, side: int) -> np.ndarray:
    pixels = read(path)
    if pixels.shape != (side, side):
        raise UserError(f"{path} has {pixels.shape} pixels instead of {side} x {side}; get it again")
    return pixels.ravel()


def main(source: Path, out: Path) -> None:
    labelled = pictures(source / HARD)
    if len(labelled) != IMAGES:
        raise UserError(f"{source} has {len(labelled):,} pictures instead of {IMAGES:,}; get it again")
    side, tenth = len(read(labelled[0][0])), IMAGES // 10
    members = np.empty(IMAGES, np.uint8)
    published = Generator().manual_seed(42)  # as in the code of the paper
    for split, part in enumerate(random_split(range(IMAGES), (IMAGES - 2 * tenth, tenth, tenth), published)):
        members[part.indices] = split
    rows = (square(path, side) for path, _ in labelled)
    with new_folder(str(out)) as folder:
        write_arrays(folder, rows, [label for _, label in labelled], members, LABELS)
        draw_examples(folder)


if __name__ == "__main__":
    run_program(__doc__, main)
