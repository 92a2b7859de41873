"""`dense` for training on NVIDIA GPUs: one kernel computes the gradient before the activation and that of the bias."""

from typing import List, Tuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mega_fairseq.ops.activations import ACTIVATIONS
from mega_fairseq.ops.operators import operator
from mega_fairseq.ops.rows import add_parts, launch_rows, new_parts, silu, store_part, sum_of_rows, tile, tiles


@triton.jit
def silu_backward(before, dy, dbefore, sums, R, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr):
    """From the gradient of silu(before), that of `before`, and parts of its column sums."""
    total = tl.zeros([ROWS, COLUMNS], WIDE)
    for turn in range(tiles(R, ROWS)):
        row, column, inside = tile(turn, R, width, ROWS, COLUMNS)
        at = row * width + column
        _, slope = silu(tl.load(before + at, mask=inside, other=0.0).to(WIDE))
        grad = tl.load(dy + at, mask=inside, other=0.0).to(WIDE) * slope
        tl.store(dbefore + at, grad.to(dbefore.dtype.element_ty), mask=inside)
        total += grad
    store_part(sums, total, width, width, COLUMNS)


def _forward(x: Tensor, weight: Tensor, bias: Tensor, activation: str) -> Tuple[Tensor, Tensor]:
    before = torch.addmm(bias, x, weight.t())
    if activation == "linear":
        return before, before.new_empty(0)
    return ACTIVATIONS[activation].forward(before), before


def _fake(x: Tensor, weight: Tensor, bias: Tensor, activation: str) -> Tuple[Tensor, Tensor]:
    y = x.new_empty(x.size(0), weight.size(0))
    return y, x.new_empty(0) if activation == "linear" else torch.empty_like(y)


def _backward(grads, saved, x: Tensor, weight: Tensor, bias: Tensor, activation: str) -> List[Tensor]:
    (before,), dy = saved, grads[0].contiguous()
    if activation == "silu":
        dbefore, parts = torch.empty_like(before), new_parts(dy, dy.size(1))
        launch_rows(silu_backward, len(parts), dy.size(1), dy, before, dy, dbefore, parts, *dy.shape)
        dbias = add_parts(parts, dy.dtype)
    else:
        dbefore = dy if activation == "linear" else ACTIVATIONS[activation].backward(dy, before)
        dbias = sum_of_rows(dbefore)
    return [torch.mm(dbefore, weight), torch.mm(dbefore.t(), x), dbias]


# f(x W^T + b) for rows x, and its argument, which is saved for backward; empty if f is "linear".
dense = operator(
    "dense",
    "Tensor x, Tensor weight, Tensor bias, str activation",
    "(Tensor, Tensor)",
    _forward,
    _fake,
    _backward,
)
