"""Layer norm and RMS norm of rows, with sums in float32 or better.

`normalized_naive` is the definition, and triton.py the form for training on NVIDIA GPUs, which saves x alone. Torch's
kernels take three to four times as long as reading and writing the gradients, because of those of weight and bias.
"""

from typing import Any, Optional, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from mega_fairseq.ops.backend import Forms
from mega_fairseq.ops.precision import at_least_float32, sums_in_half

WIDEST = 8192  # numbers that a program of the GPU holds at once


def normalized_naive(x: Tensor, weight: Optional[Tensor], bias: Optional[Tensor], eps: float, center: bool) -> Tensor:
    """w (x - mean) / sqrt(var + eps) + b over the last dimension, in x's dtype; without `center`, as if mean were 0."""
    wide = x.to(at_least_float32(x.dtype))  # squares overflow in half precision
    if center:
        wide = wide - wide.mean(-1, keepdim=True)
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    y = y if weight is None else y * weight
    return (y if bias is None else y + bias).to(x.dtype)


def layer_norm_naive(
    x: Tensor, shape: Sequence[int], weight: Optional[Tensor], bias: Optional[Tensor], eps: float
) -> Tensor:
    """torch's, over the last dimension, with gradients of weight and bias in float32 or better."""
    if not sums_in_half(x):
        return F.layer_norm(x, shape, weight, bias, eps)
    wide = at_least_float32(x.dtype)
    weight, bias = (None if t is None else t.to(wide) for t in (weight, bias))
    return F.layer_norm(x.to(wide), shape, weight, bias, eps).to(x.dtype)


def _in_training(x: Tensor, *_: Any, **__: Any) -> bool:
    return torch.is_grad_enabled() and x.size(-1) <= WIDEST


# x (..., D) and weight and bias (D,), or weight (1,), -> (..., D).
normalized = Forms(normalized_naive, triton="mega_fairseq.ops.norm.triton:normalized", suits=_in_training)
layer_norm = Forms(layer_norm_naive, triton="mega_fairseq.ops.norm.triton:layer_norm", suits=_in_training)
