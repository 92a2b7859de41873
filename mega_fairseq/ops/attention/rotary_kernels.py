"""`rotary_distances` by one Triton kernel forward and one backward, for NVIDIA GPUs."""

import math
from typing import Any, List

import triton
import triton.language as tl
from torch import Tensor

from mega_fairseq.ops.attention.position import ROTARY_BASE
from mega_fairseq.ops.operators import operator
from mega_fairseq.ops.precision import at_least_float32
from mega_fairseq.ops.rows import add_both_parts, all_tiles, launch_rows, new_parts, store_part, tile, tiles


@triton.jit
def halves(a, b, column, half, WIDE: tl.constexpr):
    """Both halves of a and of b."""
    inside = column < half
    return (
        tl.load(a + column, mask=inside, other=0.0).to(WIDE),
        tl.load(a + half + column, mask=inside, other=0.0).to(WIDE),
        tl.load(b + column, mask=inside, other=0.0).to(WIDE),
        tl.load(b + half + column, mask=inside, other=0.0).to(WIDE),
    )


@triton.jit
def cos_sin(row, column, first, STEP: tl.constexpr, WIDE: tl.constexpr):
    """Of distance times frequency, computed in float64 as in position.py."""
    angle = (row + first).to(tl.float64) * tl.exp(column.to(tl.float64) * tl.full([1, 1], STEP, tl.float64))
    return tl.cos(angle).to(WIDE), tl.sin(angle).to(WIDE)


@triton.jit(do_not_specialize=["R", "first"])
def distances(
    a, b, out, R, half, first, STEP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """out (R,) for the distances from `first` on."""
    row, column, inside = tile(0, R, half, ROWS, COLUMNS)
    a_left, a_right, b_left, b_right = halves(a, b, column, half, WIDE)
    c, s = cos_sin(row, column, first, STEP, WIDE)
    both = (a_left * b_left + a_right * b_right) * c + (a_right * b_left - a_left * b_right) * s
    number = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tl.store(out + number, tl.sum(tl.where(inside, both, 0.0), 1), mask=number < R)


@triton.jit(do_not_specialize=["R", "first"])
def distances_backward(
    a, b, grad, sums, R, half, first, STEP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """Parts of the gradients of a and b, from grad (R,): sums (P, 4 half)."""
    of_cos, of_sin = tl.zeros([ROWS, COLUMNS], WIDE), tl.zeros([ROWS, COLUMNS], WIDE)
    for turn in range(tiles(R, ROWS)):
        row, column, inside = tile(turn, R, half, ROWS, COLUMNS)
        c, s = cos_sin(row, column, first, STEP, WIDE)
        g = tl.load(grad + row, mask=row < R, other=0.0).to(WIDE)
        of_cos += g * c
        of_sin += g * s
    a_left, a_right, b_left, b_right = halves(a, b, tl.arange(0, COLUMNS)[None, :], half, WIDE)
    store_part(sums, b_left * of_cos - b_right * of_sin, 4 * half, half, COLUMNS)
    store_part(sums + half, b_right * of_cos + b_left * of_sin, 4 * half, half, COLUMNS)
    store_part(sums + 2 * half, a_left * of_cos + a_right * of_sin, 4 * half, half, COLUMNS)
    store_part(sums + 3 * half, a_right * of_cos - a_left * of_sin, 4 * half, half, COLUMNS)


def _launch(kernel: Any, programs: int, a: Tensor, b: Tensor, *tensors: Tensor, count: int, first: int) -> None:
    half, columns = a.size(0) // 2, triton.next_power_of_2(a.size(0) // 2)
    args = (a.contiguous(), b.contiguous(), *tensors, count, half, first)
    launch_rows(kernel, programs, half, a, *args, columns=columns, STEP=-math.log(ROTARY_BASE) / half)


def _forward(a: Tensor, b: Tensor, first: int, stop: int) -> Tensor:
    out = _fake(a, b, first, stop)
    _launch(distances, all_tiles(len(out), a.size(0) // 2), a, b, out, count=len(out), first=first)
    return out


def _fake(a: Tensor, b: Tensor, first: int, stop: int) -> Tensor:
    return a.new_empty(stop - first, dtype=at_least_float32(a.dtype))


def _backward(grads, _, a: Tensor, b: Tensor, first: int, stop: int) -> List[Tensor]:
    (grad,), width = grads, a.size(0)
    parts = new_parts(grad.unsqueeze(1), 2 * width)
    _launch(distances_backward, len(parts), a, b, grad.contiguous(), parts, count=len(grad), first=first)
    return list(add_both_parts(parts, a.dtype, width, width))


rotary_distances = operator(
    "rotary_distances", "Tensor a, Tensor b, int first, int stop", "Tensor", _forward, _fake, _backward
)
