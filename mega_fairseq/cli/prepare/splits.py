"""Which example belongs to which split: arrays of 0 (train), 1 (valid) and 2 (test)."""

from random import Random
from typing import Sequence

import numpy as np


def stratified(labels: Sequence[int], sizes: Sequence[int], name: str) -> np.ndarray:
    """Random splits of these sizes with equal shares of all labels in each; `name` decides which ones."""
    random, ties, places = Random(name), Random(f"{name} ties"), []
    for label in sorted(set(labels)):
        examples = [example for example, given in enumerate(labels) if given == label]
        random.shuffle(examples)
        places += [((rank + 0.5) / len(examples), ties.random(), example) for rank, example in enumerate(examples)]
    return _members([example for *_, example in sorted(places)], sizes)


def published(sizes: Sequence[int]) -> np.ndarray:
    """What torch's `random_split` with seed 42 gives, as in the code of the paper."""
    import torch  # here, because it takes seconds and workers do not need it

    return _members(torch.randperm(sum(sizes), generator=torch.Generator().manual_seed(42)).numpy(), sizes)


def _members(order: Sequence[int], sizes: Sequence[int]) -> np.ndarray:
    members = np.empty(sum(sizes), dtype=np.uint8)
    members[order] = np.repeat(np.arange(len(sizes), dtype=np.uint8), sizes)
    return members
