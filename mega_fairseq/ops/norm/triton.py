"""`normalized` by one Triton kernel forward and one backward, which also adds up the gradients of weight and bias."""

from typing import Any, Optional, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from mega_fairseq.ops.operators import operator
from mega_fairseq.ops.precision import at_least_float32, autocast_dtype
from mega_fairseq.ops.rows import (
    add_both_sums,
    add_sums,
    all_tiles,
    launch_rows,
    new_sums,
    store_sums,
    tile,
    tile_count,
)


@triton.jit
def standardized(x, inside, width, EPS: tl.constexpr, CENTER: tl.constexpr):
    """(x - mean) / sqrt(var + eps) of whole rows, and the factor 1 / sqrt(var + eps) (ROWS, 1)."""
    if CENTER:
        x = tl.where(inside, x - (tl.sum(x, 1) / width)[:, None], 0.0)
    scale = 1.0 / tl.sqrt((tl.sum(x * x, 1) / width)[:, None] + tl.full([1, 1], EPS, x.dtype))
    return x * scale, scale


@triton.jit
def normalize(
    x, weight, bias, y, R, width,
    EPS: tl.constexpr, CENTER: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    row, column, inside = tile(0, R, width, ROWS, COLUMNS)
    at = row * width + column
    out, _ = standardized(tl.load(x + at, mask=inside, other=0.0).to(WIDE), inside, width, EPS, CENTER)
    if weight is not None:
        out *= tl.load(weight + column, mask=column < width, other=0.0).to(WIDE)
    if bias is not None:
        out += tl.load(bias + column, mask=column < width, other=0.0).to(WIDE)
    tl.store(y + at, out.to(y.dtype.element_ty), mask=inside)


@triton.jit
def normalize_backward(
    x, weight, dy, dx, sums, R, width, sums_stride,
    EPS: tl.constexpr, CENTER: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The gradient of x, and sums of those of weight and bias, which are side by side."""
    total_weight, total_bias = tl.zeros([ROWS, COLUMNS], WIDE), tl.zeros([ROWS, COLUMNS], WIDE)
    for turn in range(tile_count(R, ROWS)):
        row, column, inside = tile(turn, R, width, ROWS, COLUMNS)
        at = row * width + column
        grad = tl.load(dy + at, mask=inside, other=0.0).to(WIDE)
        out, scale = standardized(tl.load(x + at, mask=inside, other=0.0).to(WIDE), inside, width, EPS, CENTER)
        total_weight += grad * out
        total_bias += grad
        if weight is not None:
            grad *= tl.load(weight + column, mask=column < width, other=0.0).to(WIDE)
        change = grad - out * (tl.sum(grad * out, 1) / width)[:, None]
        if CENTER:
            change -= (tl.sum(grad, 1) / width)[:, None]
        tl.store(dx + at, (change * scale).to(dx.dtype.element_ty), mask=inside)
    store_sums(sums, total_weight, sums_stride, width, COLUMNS)
    store_sums(sums + width, total_bias, sums_stride, width, COLUMNS)


def _launch(kernel: Any, programs: int, x: Tensor, *args: Any, **options: Any) -> None:
    """With whole rows in each program, and at most 16 numbers of a row in each thread."""
    columns = triton.next_power_of_2(x.size(1))
    launch_rows(kernel, programs, x.size(1), x, x, *args, **options, columns=columns, num_warps=max(2, columns // 512))


def _forward(x: Tensor, weight: Optional[Tensor], bias: Optional[Tensor], eps: float, center: bool) -> Tensor:
    x, weight, bias = (None if t is None else t.contiguous() for t in (x, weight, bias))
    y = torch.empty_like(x)
    _launch(normalize, all_tiles(*x.shape), x, weight, bias, y, *x.shape, EPS=eps, CENTER=center)
    return y


def _backward(grads, _, x: Tensor, weight: Optional[Tensor], bias: Optional[Tensor], eps: float, center: bool):
    x, factor = x.contiguous(), None if weight is None else weight.contiguous()
    dx, sums, width = torch.empty_like(x), new_sums(x, 2 * x.size(1)), x.size(1)
    args = (factor, grads[0].contiguous(), dx, sums, *x.shape, sums.size(1))
    _launch(normalize_backward, len(sums), x, *args, EPS=eps, CENTER=center)
    if bias is not None:
        return [dx, *add_both_sums(sums, weight.dtype, width, width)]
    return [dx] if weight is None else [dx, add_sums(sums[:, :width], weight.dtype)]


_normalized = operator(
    "normalized(Tensor x, Tensor? weight, Tensor? bias, float eps, bool center) -> Tensor",
    _forward,
    lambda x, *_: x.new_empty(x.shape),
    _backward,
)


def normalized(x: Tensor, weight: Optional[Tensor], bias: Optional[Tensor], eps: float, center: bool) -> Tensor:
    weight = None if weight is None else weight.expand(x.size(-1))
    return _normalized(x.flatten(0, -2), weight, bias, eps, center).view(x.shape)


def layer_norm(x: Tensor, shape: Sequence[int], weight: Optional[Tensor], bias: Optional[Tensor], eps: float) -> Tensor:
    x = x if autocast_dtype(x) is None else x.to(at_least_float32(x.dtype))  # as torch's under autocast
    return normalized(x, weight, bias, eps, center=True)
