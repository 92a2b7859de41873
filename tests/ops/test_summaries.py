"""The state of fixed sparse attention keeps all places that later ones see, and only those."""

import pytest
import torch

from mega_fairseq.ops.attention.chunks import KeyValues
from mega_fairseq.ops.padding import padding_from_lengths
from mega_fairseq.ops.sparse.summaries import advance, restore, summarize
from tests.ops.helpers import noise

STRIDE, KEPT, DIM = 4, 2, 3
LENGTHS = [1, 3, 4, 5, 8, 11, 12]


def cache(total, lengths=None):
    padding = None if lengths is None else padding_from_lengths(torch.tensor(lengths), total)
    tensors = [noise(3, total, DIM, seed=seed) for seed in (0, 1)]
    return KeyValues(*(t if padding is None else t.masked_fill(padding.unsqueeze(-1), 0.0) for t in tensors), padding)


def needed(length):
    """Places of a row that later places see."""
    whole = length - length % STRIDE
    return [place for place in range(length) if place >= whole or place % STRIDE >= STRIDE - KEPT]


@pytest.mark.parametrize("total", LENGTHS)
def test_what_later_places_see_is_restored_and_the_rest_is_zero(total):
    before = cache(total)
    after = restore(summarize(before, STRIDE, KEPT, DIM), STRIDE, KEPT)
    for ours, truth in zip(after[:2], before[:2]):
        expected = torch.zeros_like(truth)
        expected[:, needed(total)] = truth[:, needed(total)]
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("lengths", [(12, 5, 0), (3, 1, 2), (8, 11, 4)], ids=str)
def test_rows_of_different_lengths_are_restored_each(lengths):
    before = cache(12, lengths)
    state = summarize(before, STRIDE, KEPT, DIM)
    after = restore(state, STRIDE, KEPT)
    for row, length in enumerate(lengths):
        real = ~after.padding[row]
        assert int(real.sum()) == length
        for ours, truth in zip(after[:2], before[:2]):
            assert torch.equal(ours[row, real][needed(length)], truth[row, needed(length)])
    assert not any(t[p].any() for part in state for t, p in ((part.keys, part.padding), (part.values, part.padding)))


@pytest.mark.parametrize("width", [DIM, 0])
@pytest.mark.parametrize("total", LENGTHS)
def test_advancing_equals_summarizing_everything(total, width):
    whole = cache(total)
    for first in range(1, total):
        state = summarize(KeyValues(whole.keys[:, :first], whole.values[:, :first]), STRIDE, KEPT, width)
        joined = state.open.append(whole.keys[:, first:], whole.values[:, first:], STRIDE)
        ours, truth = advance(state, joined, STRIDE, KEPT, width), summarize(whole, STRIDE, KEPT, width)
        for a, b in zip(ours, truth):
            assert torch.equal(a.keys, b.keys)
            assert torch.equal(a.values, b.values)
