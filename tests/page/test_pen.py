"""Drawings of the page: ink on fields, and digits of any size at any place."""

import math

import numpy as np
import pytest

from mega_runtime import Classifier
from tests.helpers.commands import ROOT


def bow(x, y, wide, high, begin, end):
    """Points of an ellipse from one angle to another, in degrees."""
    angles = [math.radians(begin + (end - begin) * n / 20) for n in range(21)]
    return [(x + wide * math.cos(angle), y + high * math.sin(angle)) for angle in angles]


DIGITS = {  # strokes in a square of 1 x 1, from the upper left corner
    "0": [bow(0.5, 0.5, 0.35, 0.5, -90, 270)],
    "1": [[(0.5, 0), (0.5, 1)]],
    "2": [[*bow(0.5, 0.3, 0.35, 0.3, -150, 40), (0.15, 0.95), (0.85, 1)]],
    "3": [[*bow(0.45, 0.25, 0.4, 0.25, -150, 90), *bow(0.45, 0.75, 0.45, 0.25, -90, 150)]],
    "4": [[(0.3, 0), (0.1, 0.6), (0.9, 0.6)], [(0.7, 0.1), (0.7, 1)]],
    "5": [[(0.85, 0), (0.2, 0), (0.15, 0.45), *bow(0.45, 0.7, 0.42, 0.3, -110, 150)]],
    "6": [[(0.7, 0), (0.3, 0.3), *bow(0.48, 0.7, 0.35, 0.3, -170, 190)]],
    "7": [[(0.1, 0), (0.9, 0), (0.4, 1)], [(0.3, 0.5), (0.8, 0.5)]],
    "8": [[*bow(0.5, 0.25, 0.32, 0.25, 90, 450), *bow(0.5, 0.75, 0.4, 0.25, -90, 270)]],
    "9": [[*bow(0.5, 0.3, 0.35, 0.3, 0, 360), (0.8, 1)]],
}


def drawn(node, strokes, x, y, wide, high):
    moved = [[{"x": x + wide * a, "y": y + high * b} for a, b in points] for points in strokes]
    return node.ask("pen", strokes=moved)


@pytest.mark.parametrize("place", [(1.7, 0.5, 4.6, 7), (0.6, 0.6, 3, 4.5), (5, 4, 2, 3), (0.5, 0.5, 6, 7)])
def test_digits_of_any_size_are_recognised_at_any_place(node, place):
    fields = [drawn(node, strokes, *place)[1] for strokes in DIGITS.values()]
    found = Classifier(ROOT / "pretrained/digits").predict(np.array(fields, np.uint8))
    right = [each.label == digit for each, digit in zip(found, DIGITS)]
    assert sum(right) >= len(right) - 1, [each.label for each in found]


def test_ink_is_where_the_pen_was(node):
    shown, recognised = np.reshape(drawn(node, [[(0, 0), (0, 1)]], 1.5, 1.5, 1, 3), (2, 8, 8))
    assert (shown[1:5, 1] == 255).all()
    assert not shown[:, 4:].any()
    assert not shown[6:].any()
    assert (recognised[1:7, 3:5] > 0).all()
    np.testing.assert_array_equal(recognised, recognised[:, ::-1])
    np.testing.assert_array_equal(recognised, recognised[::-1])


def test_a_dot_stays_a_dot(node):
    assert np.count_nonzero(drawn(node, [[(0, 0)]], 1, 2, 1, 1)[1]) == 4
