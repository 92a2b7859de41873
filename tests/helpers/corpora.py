"""A corpus in memory whose tokens differ by position."""

from typing import Sequence

import numpy as np

from mega_fairseq.data import Corpus

TYPES, FIRST = 200, 4  # the first type that is a word


def tokens(count: int) -> np.ndarray:
    """Token types by position; neighbours differ, so that a token in the wrong position is detected."""
    return FIRST + np.arange(count) * 7 % (TYPES - FIRST)


def in_memory(lines: Sequence[int], parts: Sequence[int] = ()) -> Corpus:
    """A corpus of lines with these lengths, whose tokens are split at `parts`."""
    return Corpus(np.split(tokens(sum(lines)), parts), np.array(lines))
