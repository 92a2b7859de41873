"""A corpus in memory whose tokens differ by position, and how cuts of a corpus depend on seed and epoch."""

from typing import Any, Callable, Sequence

import numpy as np
import torch

from mega_fairseq.data import Corpus

TYPES, FIRST = 200, 4  # the first type that is a word


def tokens(count: int) -> np.ndarray:
    """Token types by position; neighbours differ, so that a token in the wrong position is detected."""
    return FIRST + np.arange(count) * 7 % (TYPES - FIRST)


def in_memory(lines: Sequence[int], parts: Sequence[int] = ()) -> Corpus:
    """A corpus of lines with these lengths, whose tokens are split at `parts`."""
    return Corpus(np.split(tokens(sum(lines)), parts), np.array(lines))


def assert_cuts_depend_only_on_seed_and_epoch(make: Callable[[int], Any], cuts_of: Callable[[Any], np.ndarray]) -> None:
    """`make` is a function from a seed to a dataset."""
    cuts = set()
    for seed in (1, 2):
        dataset = make(seed)
        for epoch in (1, 2, 3):
            np.random.rand(epoch)
            torch.rand(epoch)
            dataset.set_epoch(epoch)
            cuts.add(tuple(cuts_of(dataset).tolist()))
    assert len(cuts) == 6
    again = make(2)
    again.set_epoch(3)
    assert cuts_of(again).tolist() == cuts_of(dataset).tolist()
