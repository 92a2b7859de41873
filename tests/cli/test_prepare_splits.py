"""Splits of data sets: those that were published, and equal shares of all labels."""

import numpy as np

from mega_fairseq.cli.prepare.splits import published as published_splits
from mega_fairseq.cli.prepare.splits import stratified


def test_published_splits_are_those_of_torch():
    from torch import Generator
    from torch.utils.data import random_split

    train, valid = random_split(range(100), (90, 10), generator=Generator().manual_seed(42))
    members = published_splits((90, 10))
    assert sorted(train.indices) == np.flatnonzero(members == 0).tolist()
    assert sorted(valid.indices) == np.flatnonzero(members == 1).tolist()


def test_splits_have_equal_shares_of_all_labels_and_no_order_of_labels_among_few_examples():
    labels = [number % 4 for number in range(400)]
    members = stratified(labels, (320, 40, 40), "seed")
    assert all(
        ((members == split) & (np.array(labels) == label)).sum() == size // 4
        for split, size in enumerate((320, 40, 40))
        for label in range(4)
    )
    few = stratified([number // 5 for number in range(500)], (400, 50, 50), "seed")  # one of each label is held out
    in_valid = {place // 5 for place in np.flatnonzero(few == 1)}
    assert 10 < len(in_valid & set(range(50))) < 40
