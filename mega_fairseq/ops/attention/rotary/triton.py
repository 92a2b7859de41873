"""`with_rotary_columns` by Triton kernels: one forward and one backward for queries, and for keys."""

from typing import Any, List

import torch
import triton
import triton.language as tl
from torch import Tensor

from mega_fairseq.ops.operators import operator
from mega_fairseq.ops.rows import add_parts, all_tiles, launch_rows, new_parts, store_part, tile, turns


@triton.jit
def append_rows(
    x, vector, cos, sin, out, R, length, half,
    SCALE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Rows of x and of the vector have two halves, `half` wide; those of out are twice as wide."""
    row, column, inside = tile(0, R, half, ROWS, COLUMNS)
    at, at_out, at_table = row * 2 * half + column, row * 4 * half + column, row % length * half + column
    c = tl.load(cos + at_table, mask=inside, other=0.0).to(WIDE)
    s = tl.load(sin + at_table, mask=inside, other=0.0).to(WIDE)
    first = tl.load(vector + column, mask=column < half, other=0.0).to(WIDE)
    second = tl.load(vector + half + column, mask=column < half, other=0.0).to(WIDE)
    left = tl.load(x + at, mask=inside, other=0.0).to(WIDE) * tl.full([1, 1], SCALE, WIDE)
    right = tl.load(x + at + half, mask=inside, other=0.0).to(WIDE) * tl.full([1, 1], SCALE, WIDE)
    tl.store(out + at_out, left.to(out.dtype.element_ty), mask=inside)
    tl.store(out + at_out + half, right.to(out.dtype.element_ty), mask=inside)
    tl.store(out + at_out + 2 * half, (first * c - second * s).to(out.dtype.element_ty), mask=inside)
    tl.store(out + at_out + 3 * half, (second * c + first * s).to(out.dtype.element_ty), mask=inside)


@triton.jit
def append_backward(
    cos, sin, dout, dx, sums, R, length, half,
    SCALE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The gradient of x, and parts of that of the vector: sums (P, 2 half)."""
    of_first, of_second = tl.zeros([ROWS, COLUMNS], WIDE), tl.zeros([ROWS, COLUMNS], WIDE)
    for turn in range(turns(R, ROWS)):
        row, column, inside = tile(turn, R, half, ROWS, COLUMNS)
        at, at_out, at_table = row * 2 * half + column, row * 4 * half + column, row % length * half + column
        c = tl.load(cos + at_table, mask=inside, other=0.0).to(WIDE)
        s = tl.load(sin + at_table, mask=inside, other=0.0).to(WIDE)
        left = tl.load(dout + at_out, mask=inside, other=0.0).to(WIDE) * tl.full([1, 1], SCALE, WIDE)
        right = tl.load(dout + at_out + half, mask=inside, other=0.0).to(WIDE) * tl.full([1, 1], SCALE, WIDE)
        tl.store(dx + at, left.to(dx.dtype.element_ty), mask=inside)
        tl.store(dx + at + half, right.to(dx.dtype.element_ty), mask=inside)
        turned_left = tl.load(dout + at_out + 2 * half, mask=inside, other=0.0).to(WIDE)
        turned_right = tl.load(dout + at_out + 3 * half, mask=inside, other=0.0).to(WIDE)
        of_first += turned_left * c + turned_right * s
        of_second += turned_right * c - turned_left * s
    store_part(sums, of_first, 2 * half, half, COLUMNS)
    store_part(sums + half, of_second, 2 * half, half, COLUMNS)


def _forward(x: Tensor, vector: Tensor, cos: Tensor, sin: Tensor, scale: float) -> Tensor:
    x, vector, cos, sin = (t.contiguous() for t in (x, vector, cos, sin))
    (groups, length, width), out = x.shape, _fake(x)
    args = (x, vector, cos, sin, out, groups * length, length, width // 2)
    launch_rows(append_rows, all_tiles(groups * length, width // 2), width // 2, x, *args, SCALE=scale)
    return out


def _fake(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.size(0), x.size(1), 2 * x.size(2))


def _backward(grads, _, x: Tensor, vector: Tensor, cos: Tensor, sin: Tensor, scale: float) -> List[Tensor]:
    dx, parts = torch.empty_like(x, memory_format=torch.contiguous_format), new_parts(x.flatten(0, 1), x.size(2))
    args = (cos.contiguous(), sin.contiguous(), grads[0].contiguous(), dx, parts, x.size(0) * x.size(1), x.size(1))
    half = x.size(2) // 2
    launch_rows(append_backward, len(parts), half, x, *args, half, SCALE=scale)
    return [dx, add_parts(parts, vector.dtype)]


# [scale x, R_i vector] for x (G, n, z), with the `turns` of its positions, whose gradients are not computed.
append = operator(
    "append_rotary_columns",
    "Tensor x, Tensor vector, Tensor cos, Tensor sin, float scale",
    "Tensor",
    _forward,
    _fake,
    _backward,
    gradients=2,
)
