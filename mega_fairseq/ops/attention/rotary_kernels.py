"""Rotations, and the rotary bias as a function of distance, by Triton kernels, for NVIDIA GPUs."""

import math
from typing import Any, List, Tuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mega_fairseq.ops.operators import operator, without_gradient
from mega_fairseq.ops.precision import at_least_float32
from mega_fairseq.ops.rows import add_both_sums, all_tiles, launch_rows, new_sums, store_sums, tile, tile_count
from mega_fairseq.ops.turns import ROTARY_BASE

# ------------------------------------------------------------------------------------------- rotations


@triton.jit
def circle(position, column, STEP: tl.constexpr, WIDE: tl.constexpr):
    """cos and sin of position times frequency, computed in float64 as in position.py."""
    angle = position.to(tl.float64) * tl.exp(column.to(tl.float64) * tl.full([1, 1], STEP, tl.float64))
    return tl.cos(angle).to(WIDE), tl.sin(angle).to(WIDE)


@triton.jit(do_not_specialize=["R"])
def angles(
    positions, cos, sin, R, half, STEP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    row, column, inside = tile(0, R, half, ROWS, COLUMNS)
    c, s = circle(tl.load(positions + row, mask=row < R, other=0), column, STEP, WIDE)
    tl.store(cos + row * half + column, c, mask=inside)
    tl.store(sin + row * half + column, s, mask=inside)


@triton.jit(do_not_specialize=["R", "A"])
def turn(
    x, cos, sin, y, R, width, half, heads, A,
    BACK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Turns the first 2 half columns of x (R, width) by A rows of angles, which recur, each for so many `heads`."""
    row, column, inside = tile(0, R, width, ROWS, COLUMNS)
    left, turns = column < half, inside & (column < 2 * half)
    value = tl.load(x + row * width + column, mask=inside, other=0.0).to(WIDE)
    other = tl.load(x + row * width + tl.where(left, column + half, column - half), mask=turns, other=0.0).to(WIDE)
    at = row // heads % A * half + column % half
    c, s = tl.load(cos + at, mask=turns, other=1.0), tl.load(sin + at, mask=turns, other=0.0)
    if BACK:
        s = -s
    out = value * c + other * tl.where(left, -s, s)
    tl.store(y + row * width + column, out.to(y.dtype.element_ty), mask=inside)


def _step(dim: int) -> float:
    """The logarithm of the ratio of two neighbouring frequencies."""
    return -math.log(ROTARY_BASE) / (dim // 2)


def _angles(positions: Tensor, dim: int, dtype: torch.dtype) -> Tuple[Tensor, Tensor]:
    cos, sin = both = _angles_fake(positions, dim, dtype)
    rows, half = positions.numel(), dim // 2
    args = (positions.contiguous(), cos, sin, rows, half)
    launch_rows(angles, all_tiles(rows, half), half, cos, *args, STEP=_step(dim))
    return both


def _angles_fake(positions: Tensor, dim: int, dtype: torch.dtype) -> Tuple[Tensor, Tensor]:
    return tuple(positions.new_empty(*positions.shape, dim // 2, dtype=dtype) for _ in range(2))


_cos_sin = without_gradient(
    "cos_sin(Tensor positions, int dim, ScalarType dtype) -> (Tensor, Tensor)", _angles, _angles_fake
)


def cos_sin(positions: Tensor, dim: int, dtype: torch.dtype) -> Tuple[Tensor, Tensor]:
    return _cos_sin(positions, dim, at_least_float32(dtype))


def _turn(x: Tensor, cos: Tensor, sin: Tensor, heads: int, back: bool = False) -> Tensor:
    x, width, half = x.contiguous(), x.size(-1), cos.size(-1)
    y, rows = torch.empty_like(x), x.numel() // width
    args = (x, cos.contiguous(), sin.contiguous(), y, rows, width, half, heads, cos.numel() // half)
    launch_rows(turn, all_tiles(rows, width), width, cos, *args, BACK=back)
    return y


_turned = operator(
    "turned(Tensor x, Tensor cos, Tensor sin, int heads) -> Tensor",
    _turn,
    lambda x, *_: x.new_empty(x.shape),
    lambda grads, _, x, cos, sin, heads: [_turn(grads[0], cos, sin, heads, back=True)],
    gradients=1,
)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    # The same angles for all heads of a token, and for all sequences.
    heads = x.size(-2) if cos.dim() > 1 and cos.size(-2) == 1 else 1
    return _turned(x, cos, sin, heads)


# ------------------------------------------------------------------------------------------- the rotary bias


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


@triton.jit(do_not_specialize=["R", "first"])
def distances(
    a, b, out, R, half, first, STEP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """out (R,) for the distances from `first` on."""
    row, column, inside = tile(0, R, half, ROWS, COLUMNS)
    a_left, a_right, b_left, b_right = halves(a, b, column, half, WIDE)
    c, s = circle(row + first, column, STEP, WIDE)
    both = (a_left * b_left + a_right * b_right) * c + (a_right * b_left - a_left * b_right) * s
    number = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tl.store(out + number, tl.sum(tl.where(inside, both, 0.0), 1), mask=number < R)


@triton.jit(do_not_specialize=["R", "first"])
def distances_backward(
    a, b, grad, sums, R, half, first, STEP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """Sums of the gradients of a and b, from grad (R,): (P, 4 half)."""
    of_cos, of_sin = tl.zeros([ROWS, COLUMNS], WIDE), tl.zeros([ROWS, COLUMNS], WIDE)
    for turn in range(tile_count(R, ROWS)):
        row, column, inside = tile(turn, R, half, ROWS, COLUMNS)
        c, s = circle(row + first, column, STEP, WIDE)
        g = tl.load(grad + row, mask=row < R, other=0.0).to(WIDE)
        of_cos += g * c
        of_sin += g * s
    a_left, a_right, b_left, b_right = halves(a, b, tl.arange(0, COLUMNS)[None, :], half, WIDE)
    store_sums(sums, b_left * of_cos - b_right * of_sin, 4 * half, half, COLUMNS)
    store_sums(sums + half, b_right * of_cos + b_left * of_sin, 4 * half, half, COLUMNS)
    store_sums(sums + 2 * half, a_left * of_cos + a_right * of_sin, 4 * half, half, COLUMNS)
    store_sums(sums + 3 * half, a_right * of_cos - a_left * of_sin, 4 * half, half, COLUMNS)


def _launch(kernel: Any, programs: int, a: Tensor, b: Tensor, *tensors: Tensor, count: int, first: int) -> None:
    half, columns = a.size(0) // 2, triton.next_power_of_2(a.size(0) // 2)
    args = (a.contiguous(), b.contiguous(), *tensors, count, half, first)
    launch_rows(kernel, programs, half, a, *args, columns=columns, STEP=_step(a.size(0)))


def _forward(a: Tensor, b: Tensor, first: int, stop: int) -> Tensor:
    out = _fake(a, b, first, stop)
    _launch(distances, all_tiles(len(out), a.size(0) // 2), a, b, out, count=len(out), first=first)
    return out


def _fake(a: Tensor, b: Tensor, first: int, stop: int) -> Tensor:
    return a.new_empty(stop - first, dtype=at_least_float32(a.dtype))


def _backward(grads, _, a: Tensor, b: Tensor, first: int, stop: int) -> List[Tensor]:
    (grad,), width = grads, a.size(0)
    sums = new_sums(grad.unsqueeze(1), 2 * width)
    _launch(distances_backward, len(sums), a, b, grad.contiguous(), sums, count=len(grad), first=first)
    return list(add_both_sums(sums, a.dtype, width, width))


rotary_distances = operator(
    "rotary_distances(Tensor a, Tensor b, int first, int stop) -> Tensor", _forward, _fake, _backward
)
