"""Layer norm and RMS norm of rows, with sums in float32 or better.

`normalized_naive` is the definition, and triton.py the form for training on NVIDIA GPUs, which saves x alone. Torch's
kernels take three to four times as long as reading and writing the gradients, because of those of weight and bias.
"""

from typing import Optional

import torch
from torch import Tensor

from mega_fairseq.ops.backend import TRITON, backend
from mega_fairseq.ops.precision import at_least_float32

WIDEST = 8192  # numbers that a program of the GPU holds at once


def normalized_naive(x: Tensor, weight: Optional[Tensor], bias: Optional[Tensor], eps: float, center: bool) -> Tensor:
    """w (x - mean) / sqrt(var + eps) + b over the last dimension, in x's dtype; without `center`, as if mean were 0."""
    wide = x.to(at_least_float32(x.dtype))  # squares overflow in half precision
    if center:
        wide = wide - wide.mean(-1, keepdim=True)
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    y = y if weight is None else y * weight
    return (y if bias is None else y + bias).to(x.dtype)


def kernel_runs(x: Tensor) -> bool:
    """Whether `normalized` has a kernel for x."""
    return torch.is_grad_enabled() and x.size(-1) <= WIDEST and backend(x.device) == TRITON


def normalized(x: Tensor, weight: Optional[Tensor], bias: Optional[Tensor], eps: float, center: bool) -> Tensor:
    """`normalized_naive` in the fastest form: x (..., D) and weight and bias (D,), or weight (1,), -> (..., D)."""
    if not kernel_runs(x):
        return normalized_naive(x, weight, bias, eps, center)
    from mega_fairseq.ops.norm import triton  # here, since Triton may be missing

    weight = None if weight is None else weight.expand(x.size(-1))
    return triton.normalized(x.flatten(0, -2), weight, bias, eps, center).view(x.shape)
