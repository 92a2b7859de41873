"""Sparse attention as a mixer: initialisation, and what its state remembers."""

import pytest
import torch

from mega_fairseq.modules.mixers.sparse import SparseConfig


def test_initial_deviations_are_the_released_or_the_papers():
    for init, std, output_std in (("released", 0.02, 0.02), ("scaled", 0.125 / 16, 0.125 / 16 / 12**0.5)):
        made = SparseConfig(256, init=init, layers=6).build()
        for layer in (made.query, made.key, made.value):
            assert layer.weight.std().item() == pytest.approx(std, rel=0.05)
            assert not layer.bias.any()
        assert made.output.weight.std().item() == pytest.approx(output_std, rel=0.05)
        assert not made.output.bias.any()


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
