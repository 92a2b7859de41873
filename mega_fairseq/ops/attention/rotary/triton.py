"""`with_rotary_columns` by Triton kernels: a table of cos and sin, then one kernel forward and one backward."""

import math
from typing import List, Tuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mega_fairseq.ops.attention.position import ROTARY_BASE
from mega_fairseq.ops.operators import operator
from mega_fairseq.ops.precision import at_least_float32
from mega_fairseq.ops.rows import add_both_parts, all_tiles, launch_rows, new_parts, store_part, tile, tiles


@triton.jit
def fill_table(
    cos, sin, R, half, STEP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """cos and sin (R, half) of position times frequency, computed in float64 as in position.py."""
    row, column, inside = tile(0, R, half, ROWS, COLUMNS)
    angle = row.to(tl.float64) * tl.exp(column.to(tl.float64) * tl.full([1, 1], STEP, tl.float64))
    tl.store(cos + row * half + column, tl.cos(angle).to(WIDE), mask=inside)
    tl.store(sin + row * half + column, tl.sin(angle).to(WIDE), mask=inside)


@triton.jit
def placed(row, inside, column, cos, sin, Q, length, M, first, half, WIDE: tl.constexpr):
    """Where a tile of Q rows of queries, `length` from position `first` on, and then keys, M from 0 on, has either.

    Also the numbers of its rows among queries or keys, and cos and sin of their positions.
    """
    of_queries = row < Q
    number = tl.where(of_queries, row, row - Q)
    at = tl.where(of_queries, number % length + first, number % M) * half + column
    c = tl.load(cos + at, mask=inside, other=0.0).to(WIDE)
    s = tl.load(sin + at, mask=inside, other=0.0).to(WIDE)
    return inside & of_queries, inside & (row >= Q), number, c, s


@triton.jit
def append_to(x, vector, out, here, number, column, c, s, half, SCALE: tl.constexpr, WIDE: tl.constexpr):
    """Rows of x and of the vector have two halves; those of out are twice as wide."""
    at, at_out = number * 2 * half + column, number * 4 * half + column
    first = tl.load(vector + column, mask=column < half, other=0.0).to(WIDE)
    second = tl.load(vector + half + column, mask=column < half, other=0.0).to(WIDE)
    left = tl.load(x + at, mask=here, other=0.0).to(WIDE) * tl.full([1, 1], SCALE, WIDE)
    right = tl.load(x + at + half, mask=here, other=0.0).to(WIDE) * tl.full([1, 1], SCALE, WIDE)
    tl.store(out + at_out, left.to(out.dtype.element_ty), mask=here)
    tl.store(out + at_out + half, right.to(out.dtype.element_ty), mask=here)
    tl.store(out + at_out + 2 * half, (first * c - second * s).to(out.dtype.element_ty), mask=here)
    tl.store(out + at_out + 3 * half, (second * c + first * s).to(out.dtype.element_ty), mask=here)


@triton.jit
def append_rows(
    q, k, a, b, cos, sin, out_q, out_k, R, Q, length, M, first, half,
    SCALE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    row, column, inside = tile(0, R, half, ROWS, COLUMNS)
    of_queries, of_keys, number, c, s = placed(row, inside, column, cos, sin, Q, length, M, first, half, WIDE)
    append_to(q, a, out_q, of_queries, number, column, c, s, half, SCALE, WIDE)
    append_to(k, b, out_k, of_keys, number, column, c, s, half, 1.0, WIDE)


@triton.jit
def gradients_of(dout, dx, here, number, column, c, s, half, SCALE: tl.constexpr, WIDE: tl.constexpr):
    """Stores the gradient of x and returns those of the halves of the vector."""
    at, at_out = number * 2 * half + column, number * 4 * half + column
    left = tl.load(dout + at_out, mask=here, other=0.0).to(WIDE) * tl.full([1, 1], SCALE, WIDE)
    right = tl.load(dout + at_out + half, mask=here, other=0.0).to(WIDE) * tl.full([1, 1], SCALE, WIDE)
    tl.store(dx + at, left.to(dx.dtype.element_ty), mask=here)
    tl.store(dx + at + half, right.to(dx.dtype.element_ty), mask=here)
    left = tl.load(dout + at_out + 2 * half, mask=here, other=0.0).to(WIDE)
    right = tl.load(dout + at_out + 3 * half, mask=here, other=0.0).to(WIDE)
    return left * c + right * s, right * c - left * s


@triton.jit
def append_backward(
    cos, sin, dout_q, dout_k, dq, dk, sums, R, Q, length, M, first, half,
    SCALE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The gradients of q and k, and parts of those of a and b: sums (P, 4 half)."""
    a_first, a_second = tl.zeros([ROWS, COLUMNS], WIDE), tl.zeros([ROWS, COLUMNS], WIDE)
    b_first, b_second = tl.zeros([ROWS, COLUMNS], WIDE), tl.zeros([ROWS, COLUMNS], WIDE)
    for turn in range(tiles(R, ROWS)):
        row, column, inside = tile(turn, R, half, ROWS, COLUMNS)
        of_queries, of_keys, number, c, s = placed(row, inside, column, cos, sin, Q, length, M, first, half, WIDE)
        left, right = gradients_of(dout_q, dq, of_queries, number, column, c, s, half, SCALE, WIDE)
        a_first += left
        a_second += right
        left, right = gradients_of(dout_k, dk, of_keys, number, column, c, s, half, 1.0, WIDE)
        b_first += left
        b_second += right
    store_part(sums, a_first, 4 * half, half, COLUMNS)
    store_part(sums + half, a_second, 4 * half, half, COLUMNS)
    store_part(sums + 2 * half, b_first, 4 * half, half, COLUMNS)
    store_part(sums + 3 * half, b_second, 4 * half, half, COLUMNS)


def _forward(q: Tensor, k: Tensor, a: Tensor, b: Tensor, scale: float, first: int) -> Tuple[Tensor, ...]:
    q, k, a, b = (t.contiguous() for t in (q, k, a, b))
    out_q, out_k, cos, sin = _fake(q, k, a, b, scale, first)
    rows, half = cos.shape
    launch_rows(fill_table, all_tiles(rows, half), half, q, cos, sin, rows, half, STEP=-math.log(ROTARY_BASE) / half)
    sizes = _sizes(q, k, first)
    args = (q, k, a, b, cos, sin, out_q, out_k, *sizes)
    launch_rows(append_rows, all_tiles(sizes[0], half), half, q, *args, SCALE=scale)
    return out_q, out_k, cos, sin


def _sizes(q: Tensor, k: Tensor, first: int) -> Tuple[int, ...]:
    queries, keys = (t.size(0) * t.size(1) for t in (q, k))
    return queries + keys, queries, q.size(1), k.size(1), first, q.size(2) // 2


def _fake(q: Tensor, k: Tensor, a: Tensor, b: Tensor, scale: float, first: int) -> Tuple[Tensor, ...]:
    table = (max(first + q.size(1), k.size(1)), q.size(2) // 2)
    of_both = (t.new_empty(t.size(0), t.size(1), 2 * t.size(2)) for t in (q, k))
    return (*of_both, *(q.new_empty(table, dtype=at_least_float32(q.dtype)) for _ in range(2)))


def _backward(grads, saved, q: Tensor, k: Tensor, a: Tensor, b: Tensor, scale: float, first: int) -> List[Tensor]:
    """From the gradients of queries and keys, of which one may be None."""
    douts = (t.new_zeros(*t.shape[:2], 2 * t.size(2)) if d is None else d.contiguous() for d, t in zip(grads, (q, k)))
    dq, dk = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k))
    parts, sizes = new_parts(q.flatten(0, 1), 2 * q.size(2)), _sizes(q, k, first)
    args = (*saved, *douts, dq, dk, parts, *sizes)
    launch_rows(append_backward, len(parts), sizes[-1], q, *args, SCALE=scale)
    return [dq, dk, *add_both_parts(parts, a.dtype, a.size(0), a.size(0))]


# [scale q, R_i a] for q (G, n, z) at positions first, ..., and [k, R_j b] for k (G, m, z), with cos and sin.
append = operator(
    "append_rotary_columns",
    "Tensor q, Tensor k, Tensor a, Tensor b, float scale, int first",
    "(Tensor, Tensor, Tensor, Tensor)",
    _forward,
    _fake,
    _backward,
    saved=slice(2, 4),
)
