"""Heads: splitting widths, partial RoPE, and attention at single positions against the form for sequences."""

import pytest
import torch

from mega_fairseq.ops.attention import attention
from mega_fairseq.ops.attention.heads import append_columns, merge_heads, rotate_heads, scale_places, split_heads
from mega_fairseq.ops.attention.one_position import (
    attend_at_one_position,
    head_weights_at_one_position,
    weighted_sum_by_head,
)
from mega_fairseq.ops.attention.position import rotate
from tests.ops.helpers import Recorder, assert_close, assert_same, noise, relative_error, with_gradients

ROWS, HEADS, WIDTH = 3, 2, 4


def test_heads_of_a_sequence_are_consecutive_and_merging_them_is_the_inverse():
    x = noise(ROWS, 5, HEADS * WIDTH)
    apart = split_heads(x, HEADS)
    assert_close(apart[1 * HEADS + 1], x[1, :, WIDTH:])
    assert_close(merge_heads(apart, HEADS), x)
    factors = noise(HEADS, 5, seed=1)
    assert_close(scale_places(apart, factors)[3], apart[3] * factors[1].unsqueeze(1))
    assert_close(append_columns(apart, factors.unsqueeze(2))[3], torch.cat([apart[3], factors[1].unsqueeze(1)], 1))


@pytest.mark.parametrize("dims", [2, WIDTH])
def test_the_first_dimensions_of_each_head_are_rotated_to_the_places_of_each_row(dims):
    first, chunk = torch.tensor([[0], [5], [3]]), 7
    places = torch.tensor([[0, 1, 2], [5, 6, 0], [3, 4, 5]])

    def one_by_one(x):
        heads = x.unflatten(-1, (HEADS, WIDTH))
        rows = []
        for row, own in zip(heads, places):
            rows.append(torch.stack([rotate(row[:, h, :dims], own) for h in range(HEADS)], 1))
        return torch.cat([torch.stack(rows), heads[..., dims:]], -1).flatten(2)

    inputs = {"x": noise(ROWS, 3, HEADS * WIDTH, grad=True)}
    ours = with_gradients(lambda x: rotate_heads(x, first, HEADS, dims, chunk), inputs)
    assert_same(ours, with_gradients(one_by_one, inputs))
    assert_close(rotate_heads(inputs["x"], 0, HEADS, dims)[0], ours["output 0"][0])


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "bias"])
@torch.no_grad()
def test_one_position_equals_the_last_row_of_attention(biased):
    for keys in (1, 2, 9):
        q, k, v = noise(ROWS, HEADS * WIDTH), noise(ROWS, keys, HEADS * WIDTH), noise(ROWS, keys, HEADS * 3)
        bias = noise(HEADS, keys) if biased else None
        expected = attention(*(split_heads(t, HEADS) for t in (q.unsqueeze(1), k, v)), bias=bias)
        expected = merge_heads(expected, HEADS).squeeze(1)
        assert_close(attend_at_one_position(q, k, v, HEADS, bias), expected)
        weights = head_weights_at_one_position(q, k, HEADS, bias)
        assert_close(weighted_sum_by_head(weights, v), expected)


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
