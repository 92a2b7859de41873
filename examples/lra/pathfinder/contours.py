"""Contours of Pathfinder: bars in a row, which keep a distance from all other bars.

The mask is an array of bytes that is 255 on the border and outside of the image, so that no step needs to treat edges:
a region that leaves the image crosses the border, where the mask forbids it already.
"""

import math
from functools import lru_cache
from itertools import product
from typing import Callable, Dict, List, NamedTuple, Optional, Tuple

import numpy as np
from drawing import Bar, Point, bar, dilated, disc, move

Random = Callable[[], float]
FREE = 76  # 0.3 as a byte
TRIES = 3


class Rules(NamedTuple):
    """What depends on the size of an image."""

    border: int
    distance: int  # between the starts of the two contours
    radius: float  # of the markers
    length: int  # of a bar
    thickness: float
    margins: Tuple[int, ...]  # between bars: one of these in each image
    continuity: float
    contrast: float
    contrast_of_distractors: float
    distractors: int


RULES = {
    32: Rules(1, 7, 1.5, 2, 0.5, (1,), 1.0, 1.5, 2.0, 5),
    64: Rules(1, 12, 2.5, 5, 1.0, (1,), 1.8, 0.8, 0.8, 5),
    128: Rules(1, 20, 3.0, 5, 1.5, (2, 3), 1.8, 0.9, 0.9, 8),
    256: Rules(22, 27, 5.0, 5, 2.0, (3,), 1.8, 1.0, 1.0, 7),
}


class Contour:
    """Bars drawn so far. The mask of the last one is not in the common mask yet: the next bar is close to it."""

    def __init__(self, tail: Point, angle: float, pivot: Point, first: Bar):
        self.bars = [(tail, first)]
        self.angle, self.pivot = angle, pivot

    @property
    def start(self) -> Point:
        return self.bars[0][0]

    @property
    def end(self) -> Point:
        return self.bars[-1][0]


class Candidates(NamedTuple):
    """Where the next bar may end, relative to the point where it begins."""

    points: List[Point]
    directions: List[float]
    surroundings: np.ndarray  # (candidates, pixels of the disc), offsets into the flat mask
    weights: np.ndarray  # by the turn from the last direction


class Space:
    """All that contours of one size of image and one margin have in common, computed once."""

    def __init__(self, size: int, margin: int):
        self.size, self.margin, self.rules = size, margin, RULES[size]
        self.step = self.rules.length + margin
        self.pad = 3 * self.rules.length + 5 * margin + 4  # further than any surroundings of a candidate reach
        self.side = size + 2 * self.pad
        self.empty = np.full((self.side, self.side), 255, dtype=np.uint8)
        inner = self.pad + self.rules.border
        self.empty[inner:-inner, inner:-inner] = 0
        self._bars: Dict[float, Bar] = {}
        self._candidates: Dict[float, Candidates] = {}
        self._elements: Dict[int, List[Point]] = {}
        self.first_starts = self._first_starts()

    def bar(self, angle: float) -> Bar:
        if angle not in self._bars:
            self._bars[angle] = bar(angle, self.rules.length, self.rules.thickness, self.margin)
        return self._bars[angle]

    def inside(self, point: Point) -> bool:
        return 0 <= point[0] < self.size and 0 <= point[1] < self.size

    def place(self, array: np.ndarray, point: Point, reach: int) -> np.ndarray:
        """The square around a point."""
        row, column = point[0] + self.pad, point[1] + self.pad
        return array[row - reach : row + reach + 1, column - reach : column + reach + 1]

    def join(self, mask: np.ndarray, contour: Contour) -> None:
        """Add the last bar of a contour to the mask."""
        point, last = contour.bars[-1]
        place = self.place(mask, point, last.reach)
        np.maximum(place, last.mask, out=place)

    # ------------------------------------------------------------------------------------------- starts

    def element(self, angle: int) -> List[Point]:
        """Pixels that must be free for a start; none if no start at this angle is possible.

        The published generator gives up where a pixel of the image has no pixel of the element inside the image: at
        all angles whose element misses one of the four closed quadrants.
        """
        if angle not in self._elements:
            reach = self.bar(angle).reach
            places = np.argwhere(self.bar(angle).mask == 255) - reach + 1
            points = [(int(row), int(column)) for row, column in places if max(abs(row), abs(column)) <= self.step]
            starts = all(any(y * row >= 0 and x * column >= 0 for row, column in points) for y, x in QUADRANTS)
            self._elements[angle] = points if starts else []
        return self._elements[angle]

    def free(self, mask: np.ndarray, angle: int) -> np.ndarray:
        """Flat indices of the pixels of the image where a bar at this angle may start."""
        element = self.element(angle)
        if not element:
            return np.empty(0, dtype=int)
        inner = slice(self.pad, -self.pad)
        return np.flatnonzero(dilated(mask[inner, inner], element, outside=255) <= FREE)

    def _first_starts(self) -> List[Tuple[int, np.ndarray]]:
        """Angles and free pixels for the first contour: the image is empty but for a wide frame."""
        frame, mask = 2 * self.rules.distance + self.pad, np.full_like(self.empty, 255)
        mask[frame:-frame, frame:-frame] = self.empty[frame:-frame, frame:-frame]
        places = ((angle, self.free(mask, angle)) for angle in range(-180, 180))
        return [(angle, pixels) for angle, pixels in places if len(pixels)]

    def _contour(self, tail: Point, angle: int) -> Optional[Contour]:
        head = move(tail, angle, self.rules.length)
        pivot = move(head, angle + 180, self.step)
        if self.inside(tail) and self.inside(head) and self.inside(pivot):
            return Contour(tail, angle, pivot, self.bar(angle))
        return None

    def _at(self, pixels: np.ndarray, angle: int, random: Random) -> Optional[Contour]:
        row, column = divmod(int(pixels[int(random() * len(pixels))]), self.size)
        return self._contour((row, column), angle)

    def start_first(self, random: Random) -> Optional[Contour]:
        angle, pixels = self.first_starts[int(random() * len(self.first_starts))]
        return self._at(pixels, angle, random)

    def start_second(self, first: Contour, random: Random) -> Optional[Contour]:
        for _ in range(TRIES):
            turn, angle = _angle(random) * math.pi / 180, _angle(random)
            row, column = first.start
            away = self.rules.distance
            tail = round(row + away * math.sin(turn)), round(column + away * math.cos(turn))
            contour = self._contour(tail, angle)
            if contour is not None:
                return contour
        return None

    def start_distractor(self, mask: np.ndarray, random: Random) -> Optional[Contour]:
        inner = slice(self.pad, -self.pad)
        if np.mean(mask[inner, inner] <= FREE) < 0.01:
            return None
        for _ in range(TRIES):
            angle = _angle(random)
            pixels = self.free(mask, angle)
            if not len(pixels):
                return None
            contour = self._at(pixels, angle, random)
            if contour is not None:
                return contour
        return None

    # --------------------------------------------------------------------------------------- extensions

    def candidates(self, angle: float) -> Candidates:
        if angle not in self._candidates:
            circle = np.arange(0, 2 * math.pi, 1 / self.step)
            points = sorted(
                {(math.floor(self.step * math.sin(t)), math.floor(self.step * math.cos(t))) for t in circle}
            )
            directions = [math.degrees(math.atan2(row, column)) for row, column in points]
            turns = [abs((direction - angle + 180) % 360 - 180) for direction in directions]
            cosines = [math.cos(math.radians(min(self.rules.continuity * turn, 90))) for turn in turns]
            chosen = [i for i, cosine in enumerate(cosines) if cosine > 1e-9]
            around = [row * self.side + column for row, column in disc(self.margin)]
            places = np.array([points[i][0] * self.side + points[i][1] for i in chosen])
            self._candidates[angle] = Candidates(
                [points[i] for i in chosen],
                [directions[i] for i in chosen],
                places[:, None] + np.array(around),
                np.array([cosines[i] ** 2 / 255 for i in chosen]),
            )
        return self._candidates[angle]

    def extend(self, contour: Contour, mask: np.ndarray, random: Random) -> bool:
        """Add a bar to a contour and its previous bar to the mask, or fail if no place is free."""
        row, column = move(contour.pivot, contour.angle, self.rules.length + 2 * self.margin)
        near = self.candidates(contour.angle)
        here = (row + self.pad) * self.side + column + self.pad
        weights = (255 - mask.ravel().take(near.surroundings + here).max(axis=1)) * near.weights
        if weights.max() < 1e-4:
            return False
        sums = weights.cumsum()
        for _ in range(TRIES):
            chosen = int(sums.searchsorted(random() * sums[-1], side="right"))
            point = row + near.points[chosen][0], column + near.points[chosen][1]
            direction = near.directions[chosen]
            new = self.bar(direction + 180)  # from the far end back
            if (self.place(mask, point, new.reach) <= new.limit).all():
                self.join(mask, contour)
                contour.bars.append((point, new))
                contour.pivot, contour.angle = (row, column), direction
                return True
        return False


QUADRANTS = list(product((-1, 1), repeat=2))


def _angle(random: Random) -> int:
    return int(360 * random()) - 180


@lru_cache(maxsize=None)
def space(size: int, margin: int) -> Space:
    return Space(size, margin)
