"""`mega-fairseq prepare pathfinder`: do the two discs lie on one of the two long contours (label 1) or not (0)?

The rules are those of the published generator for the hard images of the Long Range Arena, with 14 bars in a contour.
Most attempts to draw two contours fail because no place is free, so four fifths of the time go into `Space.extend`: 300
times an image at 32 pixels, each a few calls of numpy on small arrays. Size 64 needs the most attempts. Three things
make it fast.
Bars are drawn once for each angle. Everything works on the squares that a bar covers. A first contour, which the
published rules let fail in eleven of twelve cases at 32 pixels whatever is in the image, is only started where it can.
"""

import argparse
from functools import lru_cache, partial
from random import Random as Seeded
from typing import Any, Dict, Iterable, List, NamedTuple, Tuple

import numpy as np

from mega_fairseq.cli import UserError
from mega_fairseq.cli.prepare.arrays import finish, row_type
from mega_fairseq.cli.prepare.contours import RULES, Contour, Random, Space, space
from mega_fairseq.cli.prepare.drawing import Point, shrinking, shrunk
from mega_fairseq.cli.prepare.folder import MOST, Folder

BARS, BARS_OF_DISTRACTORS = 14, 4
DISTRACTOR_TRIES = 5
PART = 100  # images
LABELS = ("0", "1")


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
    found = []
    for _ in range(where.rules.distractors):
        for _ in range(DISTRACTOR_TRIES):
            tried = mask.copy()
            contour = where.start_distractor(tried, random)
            if contour is not None and all(
                where.extend(contour, tried, random) for _ in range(BARS_OF_DISTRACTORS - 1)
            ):
                where.join(tried, contour)
                found.append(contour)
                mask = tried
                break
    return found


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


def make_part(seed: int, size: int, number: int) -> bytes:
    """A part of the data: for each image a byte for the label and the pixels."""
    rows = []
    for image in range(number * PART, (number + 1) * PART):
        drawing = draw(size, Seeded(f"pathfinder {size} {seed} {image}").random)
        rows += [bytes([drawing.label]), drawing.image.tobytes()]
    return b"".join(rows)


def settings(arguments: argparse.Namespace) -> Dict[str, int]:
    size, images = arguments.size, arguments.images
    if size not in RULES:
        raise UserError(f"--size is {size}; choose one of {', '.join(map(str, RULES))}")
    if not 10 <= images <= MOST:
        raise UserError(f"--images is {images}; give 10 to {MOST:,}, of which a tenth each is for validation and test")
    return {"size": size, "images": images, "seed": arguments.seed}


def prepare(arguments: argparse.Namespace, folder: Folder) -> None:
    size, images = arguments.size, arguments.images
    folder.make(partial(make_part, arguments.seed, size), range(-(-images // PART)), arguments.workers, PART)
    tenth = images // 10
    members = np.repeat(range(3), (images - 2 * tenth, tenth, tenth))
    finish(folder, row_type("u1", size * size), members, LABELS)
