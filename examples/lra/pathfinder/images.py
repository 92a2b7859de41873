"""Pathfinder: do the two discs lie on one of the two long contours (label 1) or not (0)?

    images.py OUT [--size 32|64|128|256] [--images N] [--seed N] [--workers N]

Of the images, 8/10 are for training and 1/10 each for validation and test. An interrupted run is continued by the same
command: finished parts are kept in OUT.parts.

The rules are those of the published generator for the hard images of the Long Range Arena, with 14 bars in a contour.
Most attempts to draw two contours fail because no place is free, so four fifths of the time go into `Space.extend`: 300
times an image at 32 pixels, each a few calls of numpy on small arrays. Bars are therefore drawn once for each angle,
everything works on the squares that a bar covers, and a first contour, which the published rules let fail in eleven of
twelve cases at 32 pixels whatever is in the image, is only started where it can.
"""

import argparse
import os
import shutil
import sys
from functools import lru_cache, partial
from random import Random as Seeded
from typing import Any, Iterable, List, NamedTuple, Tuple

import numpy as np
from contours import RULES, Contour, Random, Space, space
from drawing import Point, shrinking, shrunk
from tqdm import tqdm

from mega_fairseq.cli import UserError
from mega_fairseq.cli.output import write
from mega_fairseq.cli.prepare import draw_examples, new_folder, write_arrays
from mega_fairseq.cli.workers import in_order

BARS, BARS_OF_DISTRACTORS = 14, 4
DISTRACTOR_TRIES = 5
PART = 100  # images


class Drawing(NamedTuple):
    """An image with its label and how it came about."""

    image: np.ndarray
    label: int
    targets: Tuple[Contour, Contour]
    distractors: List[Contour]
    attempts: int
    marked: Tuple[Point, Point]


def draw(size: int, random: Random) -> Drawing:
    """One image; `random` returns uniform numbers below 1."""
    label = int(2 * random())
    margins = RULES[size].margins
    where = space(size, margins[int(len(margins) * random())])
    attempts = 1
    targets = _targets(where, random)
    while targets is None:
        attempts += 1
        targets = _targets(where, random)
    first, second, mask = targets
    distractors = _distractors(where, mask, random)
    contours = (first, second)
    marked = int(2 * random())
    points = contours[marked].start, contours[marked if label else 1 - marked].end
    return Drawing(_image(where, contours, distractors, points), label, contours, distractors, attempts, points)


def _targets(where: Space, random: Random) -> Any:
    """Two long contours extended in turns, and the mask with both; None if one could not be extended."""
    first = where.start_first(random)
    second = None if first is None else where.start_second(first, random)
    if first is None or second is None:
        return None
    mask = where.empty.copy()
    for _ in range(BARS - 1):
        if not (where.extend(first, mask, random) and where.extend(second, mask, random)):
            return None
    where.join(mask, second)
    return first, second, mask


def _distractors(where: Space, mask: np.ndarray, random: Random) -> List[Contour]:
    distractors = []
    for _ in range(where.rules.distractors):
        for _ in range(DISTRACTOR_TRIES):
            attempt = mask.copy()
            contour = where.start_distractor(attempt, random)
            if contour is not None and all(
                where.extend(contour, attempt, random) for _ in range(BARS_OF_DISTRACTORS - 1)
            ):
                where.join(attempt, contour)
                distractors.append(contour)
                mask = attempt
                break
    return distractors


def _image(where: Space, targets: Iterable[Contour], distractors: List[Contour], marked: Iterable[Point]) -> np.ndarray:
    image = np.zeros((where.side, where.side))
    rules, inner = where.rules, slice(where.pad, -where.pad)
    for contours, contrast in ((targets, rules.contrast), (distractors, rules.contrast_of_distractors)):
        for contour in contours:
            for point, bar in contour.bars:
                place = where.place(image, point, bar.reach)
                np.maximum(place, bar.image * contrast, out=place)
    image = image[inner, inner]
    for point in marked:
        image = np.maximum(image, _marker(where.size, rules.radius, point))
    low, high = image.min(), image.max()
    return np.floor((image - low) * (255 / (high - low)) + 0.5).astype(np.uint8)


def _marker(size: int, radius: float, point: Point) -> np.ndarray:
    """A disc, drawn at twice the size."""
    rows, columns = ((np.arange(2 * size) - 2 * place) ** 2 for place in point)
    large = (rows[:, None] + columns <= (2 * radius) ** 2) * 255.0
    return shrunk(large, _halving(size))


@lru_cache(maxsize=None)
def _halving(size: int) -> np.ndarray:
    return shrinking(2 * size, size)


# ----------------------------------------------------------------------------------------------- files


def make_part(parts: str, size: int, seed: int, number: int) -> str:
    """Write the images of a part, each a byte for the label and the pixels, unless it exists; return its path."""
    path = os.path.join(parts, f"{size}-{seed}-{number:06d}")
    if not os.path.exists(path):
        drawings = (draw(size, Seeded(f"pathfinder {size} {seed} {number * PART + i}").random) for i in range(PART))
        write(path, (bytes([drawing.label]) + drawing.image.tobytes() for drawing in drawings))
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", help="a new folder")
    parser.add_argument("--size", type=int, choices=list(RULES), default=32, help="pixels of a side; 128: Path-X")
    parser.add_argument("--images", type=int, default=200_000, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="(default: %(default)s)")
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count(), metavar="N", help="processes (default: all CPUs)"
    )
    args = parser.parse_args()
    if args.images < 10:
        raise UserError(f"--images is {args.images}; give at least 10, of which a tenth each is for valid and test")
    with new_folder(args.out) as folder:
        parts = f"{args.out}.parts"
        os.makedirs(parts, exist_ok=True)
        make, numbers = partial(make_part, parts, args.size, args.seed), range(-(-args.images // PART))
        with tqdm(total=args.images, unit="image", disable=None) as bar:
            paths = []
            for path in in_order(make, numbers, args.workers):
                paths.append(path)
                bar.update(PART)
        labels = [label for path in paths for label in _rows(path, args.size)[:, 0]][: args.images]
        pixels = (row for path in paths for row in _rows(path, args.size)[:, 1:])
        tenth = args.images // 10
        members = np.repeat(range(3), (args.images - 2 * tenth, tenth, tenth))
        write_arrays(folder, pixels, labels, members, ("0", "1"))
        draw_examples(folder)
    shutil.rmtree(parts)


def _rows(path: str, size: int) -> np.ndarray:
    return np.fromfile(path, np.uint8).reshape(PART, 1 + size * size)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}.")
    except KeyboardInterrupt:
        sys.exit("error: interrupted; the same command continues.")
