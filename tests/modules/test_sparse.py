"""Sparse attention as a mixer: what its state remembers."""

import pytest
import torch

from mega_fairseq.modules.mixers.sparse import SparseConfig


def made(**options):
    torch.manual_seed(0)
    return SparseConfig(16, **{"heads": 4, "init": "scaled", "layers": 1, **options}).build().double().eval()


@pytest.mark.parametrize("combine", ["merged", "heads", "interleaved"])
@pytest.mark.parametrize("window", [None, 14])
@pytest.mark.parametrize("sizes", [(1,), (3,), (13, 2), (40,)], ids=str)
@torch.no_grad()
def test_a_fixed_state_has_an_open_block_and_summaries(combine, window, sizes):
    stride, kept = 5, 4
    module = made(stride=stride, summary=2, subblocks=2, chunk_size=window, combine=combine)
    x, state, place = torch.randn(2, 40, 16).double(), None, 0
    width = 0 if combine == "interleaved" else 16  # layer 0 sees no summaries
    while place < 40:
        size = sizes[place % len(sizes)]
        _, state = module(x[:, place : place + size], state)
        place = min(40, place + size)
        blocks, rest = divmod(place % (window or 41), stride)
        assert state.open.keys.shape == state.open.values.shape == (2, rest, 16)
        assert state.summaries.keys.shape == state.summaries.values.shape == (2, blocks * kept, width)


def test_a_state_of_another_stride_is_refused():
    x = torch.randn(2, 7, 16).double()
    _, state = made(stride=8, summary=2)(x)
    with pytest.raises(ValueError, match="state has another stride"):
        made(stride=4, summary=2)(x, state)
    _, state = made(stride=5, summary=1)(x)
    with pytest.raises(ValueError, match="state has another stride or summary"):
        made(stride=5, summary=2)(x, state)
