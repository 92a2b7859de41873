"""Lines, discs, dilation and shrinking, for Pathfinder's bars. Images are arrays of bytes, points (row, column)."""

import math
from typing import List, NamedTuple, Tuple

import numpy as np

Point = Tuple[int, int]


def move(point: Point, angle: float, distance: float) -> Point:
    """Go a distance at an angle in degrees, rounded up in each coordinate."""
    turn = angle * math.pi / 180
    return math.ceil(point[0] + distance * math.sin(turn)), math.ceil(point[1] + distance * math.cos(turn))


def line(size: int, start: Point, end: Point, width: int) -> np.ndarray:
    """A white line on a black square: Bresenham's, or a filled rectangle of whole pixels if it is wider than one."""
    image = np.zeros((size, size), dtype=np.uint8)
    if width > 1:
        _fill(image, _corners(start, end, width))
        return image
    (row, column), rows, columns = start, abs(end[0] - start[0]), abs(end[1] - start[1])
    down, right = (1 if end[axis] > start[axis] else -1 for axis in (0, 1))
    error = 2 * min(rows, columns) - max(rows, columns)
    for _ in range(max(rows, columns) + 1):
        image[row, column] = 255
        sideways = error >= 0
        error += 2 * min(rows, columns) - 2 * max(rows, columns) * sideways
        row += down * (sideways or rows >= columns)
        column += right * (sideways or rows < columns)
    return image


def _corners(start: Point, end: Point, width: int) -> List[Point]:
    rows, columns = end[0] - start[0], end[1] - start[1]
    half, length = (width - 1) / 2, math.hypot(rows, columns)
    near, far = _half_to_zero(half) / length, _half_from_zero(half) / length
    left, up = _half_to_zero(near * rows), _half_from_zero(near * columns)
    right, down = _half_to_zero(far * rows), _half_from_zero(far * columns)
    return [
        (start[0] + down, start[1] - left),
        (end[0] + down, end[1] - left),
        (end[0] - up, end[1] + right),
        (start[0] - up, start[1] + right),
    ]


def _half_to_zero(x: float) -> int:
    return int(math.copysign(math.ceil(abs(x) - 0.5), x))


def _half_from_zero(x: float) -> int:
    return int(math.copysign(math.floor(abs(x) + 0.5), x))


def _fill(image: np.ndarray, corners: List[Point]) -> None:
    """Fill a convex polygon row by row, from its left to its right edge."""
    edges = list(zip(corners, [*corners[1:], corners[0]]))
    for row in range(min(corners)[0], max(corners)[0] + 1):
        columns: List[float] = []
        for (row0, column0), (row1, column1) in edges:
            if row0 == row1 == row:
                columns += [column0, column1]
            elif row0 != row1 and min(row0, row1) <= row <= max(row0, row1):
                columns.append(column0 + (column1 - column0) * (row - row0) / (row1 - row0))
        image[row, _half_from_zero(min(columns)) : _half_to_zero(max(columns)) + 1] = 255


def disc(radius: int) -> List[Point]:
    """The points up to `radius` away from (0, 0)."""
    reach = range(-radius, radius + 1)
    return [(row, column) for row in reach for column in reach if row**2 + column**2 <= radius**2]


def dilated(image: np.ndarray, element: List[Point], outside: int = 0) -> np.ndarray:
    """The largest value of a pixel's surroundings, given as offsets; beyond the edges is the value `outside`."""
    reach = max(abs(offset) for point in element for offset in point)
    rows, columns = image.shape
    padded = np.pad(image, reach, mode="constant", constant_values=outside)
    result = np.zeros_like(image)
    for row, column in element:
        shifted = padded[reach + row : reach + row + rows, reach + column : reach + column + columns]
        np.maximum(result, shifted, out=result)
    return result


def shrinking(size: int, smaller: int) -> np.ndarray:
    """(smaller, size) Lanczos weights of three lobes, widened by the ratio of the sizes."""
    ratio = size / smaller
    centers = (np.arange(smaller) + 0.5) * ratio
    places = (np.arange(size) + 0.5 - centers[:, None]) / ratio
    weights = np.where(np.abs(places) < 3, np.sinc(places) * np.sinc(places / 3), 0.0)
    return weights / weights.sum(axis=1, keepdims=True)


def shrunk(image: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Shrink rows and then columns; both results are rounded to bytes."""
    return _as_bytes(weights @ _as_bytes(image @ weights.T))


def _as_bytes(values: np.ndarray) -> np.ndarray:
    return np.clip(np.floor(values + 0.5), 0, 255).astype(np.uint8)


class Bar(NamedTuple):
    """A bar from the centre of a square, and the larger region that other bars keep away from."""

    reach: int  # squares have 2 reach + 1 pixels on a side
    image: np.ndarray
    mask: np.ndarray
    limit: np.ndarray  # a mask above it somewhere excludes this bar


def bar(angle: float, length: int, thickness: float, margin: int) -> Bar:
    """Draw a bar at twice the size, and shrink it."""
    reach = length + math.ceil(thickness) + margin
    center, size = (2 * reach, 2 * reach), 4 * reach + 1
    weights = shrinking(size, 2 * reach + 1)
    drawn = line(size, center, move(center, angle, 2 * length), int(2 * thickness))
    mask = shrunk(dilated(drawn, disc(2 * margin)), weights)
    # Masks of value 1.8 together overlap too much: of 459, as bytes.
    limit = np.minimum(458 - mask.astype(int), 255).astype(np.uint8)
    return Bar(reach, shrunk(drawn, weights), mask, limit)
