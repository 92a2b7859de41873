"""Attention with several heads at one position: memory and precision; properties compare it with sequences."""

import pytest
import torch

from mega_fairseq.ops.attention.one_position import (
    attend_at_one_position,
    head_weights_at_one_position,
    weighted_sum_by_head,
)
from tests.ops.helpers import Recorder, noise, relative_error

ROWS, HEADS = 3, 2


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "bias"])
@torch.no_grad()
def test_one_position_copies_neither_keys_nor_values(biased):
    keys = 512
    q, k, v = (noise(*shape, dtype=torch.float32) for shape in ((ROWS, 64), (ROWS, keys, 64), (ROWS, keys, 64)))
    bias = noise(HEADS, keys, dtype=torch.float32) if biased else None
    with Recorder() as recorder:
        attend_at_one_position(q, k, v, HEADS, bias)
        weighted_sum_by_head(head_weights_at_one_position(q, k, HEADS, bias), v)
    assert recorder.largest <= ROWS * HEADS * keys


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@torch.no_grad()
def test_one_position_over_8192_keys_is_accurate_to_one_percent_in_half_precision(dtype):
    given = [noise(1, 64), noise(1, 8192, 64, seed=1), noise(1, 8192, 64, seed=2), noise(HEADS, 8192, seed=3)]
    given = [t.bfloat16() for t in given]

    def forms(kind):
        q, k, v, bias = (t.to(kind) for t in given)
        weights = head_weights_at_one_position(q, k, HEADS, bias)
        return attend_at_one_position(q, k, v, HEADS, bias), weighted_sum_by_head(weights, v)

    for y, expected in zip(forms(dtype), forms(torch.float64)):
        assert y.dtype == dtype
        assert relative_error(y, expected) < 0.01
