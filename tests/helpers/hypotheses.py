"""Hypotheses of searches as tokens and scores: their lines, and whether two searches found the same."""

import math
from typing import Any, Dict, List, Sequence, Tuple

import numpy as np

from tests.helpers.small_models import EOS, SEPARATOR

Found = List[List[Tuple[List[int], float]]]


def plain(found: Sequence[Sequence[Dict[str, Any]]]) -> Found:
    """Tokens and scores of the hypotheses of a generator of fairseq."""
    return [[(h["tokens"].tolist(), float(h["score"])) for h in each] for each in found]


def assert_same(found: Found, expected: Found, tolerance: float = 1e-4, tie: float = 1e-5) -> None:
    """The same tokens and, within the tolerance, scores; hypotheses whose scores differ by less than `tie` may swap."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected):
        assert len(one) == len(other)
        np.testing.assert_allclose([s for _, s in one], [s for _, s in other], atol=tolerance, rtol=0)
        for tokens, score in one:
            assert any(tokens == same and abs(score - near) < tolerance for same, near in other)
        for (tokens, _), (same, score) in zip(one, other):
            assert tokens == same or sum(abs(score - near) < tie for _, near in other) > 1


def assert_lines(documents: Sequence[Sequence[int]], found: Found, a: float, b: float) -> None:
    """As many lines as in the sources, whose lines have these lengths n, of 1 to a * n + b tokens."""
    assert len(found) == len(documents)
    for lengths, hypotheses in zip(documents, found):
        for tokens, score in hypotheses:
            assert math.isfinite(score)
            lines = lines_of(tokens)
            assert len(lines) == len(lengths)
            assert all(0 < len(line) <= max(1, int(a * n + b)) for line, n in zip(lines, lengths))


def lines_of(tokens: List[int]) -> List[List[int]]:
    *words, end = tokens
    assert end == EOS
    assert EOS not in words
    lines: List[List[int]] = [[]]
    for word in words:
        lines.append([]) if word == SEPARATOR else lines[-1].append(word)
    return lines
