"""`dense` for training on NVIDIA GPUs: one kernel computes the gradient before the activation and that of the bias."""

from typing import List, Optional, Tuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mega_fairseq.ops.activations import ACTIVATIONS
from mega_fairseq.ops.operators import operator
from mega_fairseq.ops.precision import cast_dtype
from mega_fairseq.ops.rows import add_sums, launch_rows, new_sums, silu, store_sums, sum_of_rows, tile, tile_count


@triton.jit
def silu_backward(
    before, dy, dbefore, y, sums, R, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """From the gradient of y = silu(before), that of `before`, and its column sums; y again if it is given."""
    total = tl.zeros([ROWS, COLUMNS], WIDE)
    for turn in range(tile_count(R, ROWS)):
        row, column, inside = tile(turn, R, width, ROWS, COLUMNS)
        at = row * width + column
        value, slope = silu(tl.load(before + at, mask=inside, other=0.0).to(WIDE))
        if y is not None:
            tl.store(y + at, value.to(y.dtype.element_ty), mask=inside)
        grad = tl.load(dy + at, mask=inside, other=0.0).to(WIDE) * slope
        tl.store(dbefore + at, grad.to(dbefore.dtype.element_ty), mask=inside)
        total += grad
    store_sums(sums, total, width, width, COLUMNS)


def _forward(x: Tensor, weight: Tensor, bias: Tensor, activation: str) -> Tuple[Tensor, Tensor]:
    before = torch.addmm(bias, x, weight.t())
    if activation == "linear":
        return before, before.new_empty(0)
    return ACTIVATIONS[activation].forward(before), before


def _fake(x: Tensor, weight: Tensor, bias: Tensor, activation: str) -> Tuple[Tensor, Tensor]:
    y = x.new_empty(x.size(0), weight.size(0))
    return y, x.new_empty(0) if activation == "linear" else torch.empty_like(y)


def _backward(grads, saved, x: Tensor, weight: Tensor, bias: Tensor, activation: str) -> List[Tensor]:
    dbefore, dbias = before_activation(grads[0].contiguous(), saved[0], activation)
    return [torch.mm(dbefore, weight), torch.mm(dbefore.t(), x), dbias]


def before_activation(dy: Tensor, before: Tensor, activation: str, y: Optional[Tensor] = None) -> Tuple[Tensor, Tensor]:
    """The gradients of `before` and of the bias. With y, silu writes f(before) to it, and the first one to dy."""
    if activation == "silu":
        dbefore, sums = torch.empty_like(before) if y is None else dy, new_sums(dy, dy.size(1))
        launch_rows(silu_backward, len(sums), dy.size(1), dy, before, dy, dbefore, y, sums, *dy.shape, num_warps=8)
        return dbefore, add_sums(sums, dy.dtype)
    dbefore = dy if activation == "linear" else ACTIVATIONS[activation].backward(dy, before)
    return dbefore, sum_of_rows(dbefore)


# f(x W^T + b) for rows x, and its argument, which is saved for backward; empty if f is "linear".
_dense = operator(
    "dense(Tensor x, Tensor weight, Tensor bias, str activation) -> (Tensor, Tensor)", _forward, _fake, _backward
)


def dense(x: Tensor, weight: Tensor, bias: Tensor, activation: str = "linear") -> Tensor:
    dtype = cast_dtype(x)  # autocast's, if it is on
    y, _ = _dense(x.to(dtype).flatten(0, -2), weight.to(dtype), bias.to(dtype), activation)
    return y.view(*x.shape[:-1], weight.size(0))
