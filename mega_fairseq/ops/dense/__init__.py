"""A projection and its activation, y = f(x W^T + b), and a second one after it.

`dense_naive` is the definition, and the form for everything but training on NVIDIA GPUs, which is in triton.py.
"""

from typing import Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mega_fairseq.ops.activations import ACTIVATIONS
from mega_fairseq.ops.backend import TRITON, backend
from mega_fairseq.ops.precision import cast_dtype


def dense_naive(x: Tensor, weight: Tensor, bias: Tensor, activation: str = "linear") -> Tensor:
    return ACTIVATIONS[activation].forward(F.linear(x, weight, bias))


def dense(x: Tensor, weight: Tensor, bias: Tensor, activation: str = "linear") -> Tensor:
    """f(x W^T + b): x (..., in), weight (out, in) -> (..., out)."""
    if not torch.is_grad_enabled() or backend(x.device) != TRITON:
        return dense_naive(x, weight, bias, activation)
    from mega_fairseq.ops.dense import triton  # here, since Triton may be missing

    dtype = cast_dtype(x)  # autocast's, if it is on
    y, _ = triton.dense(x.to(dtype).flatten(0, -2), weight.to(dtype), bias.to(dtype), activation)
    return y.view(*x.shape[:-1], weight.size(0))


Weights = Tuple[Tensor, Tensor]  # a weight and a bias


def dense_twice(x: Tensor, first: Weights, second: Weights, activation: str) -> Tensor:
    """f(x W_1^T + b_1) W_2^T + b_2. Training on GPUs saves only what is before f, and computes f again."""
    if not torch.is_grad_enabled() or backend(x.device) != TRITON:
        return dense_naive(dense_naive(x, *first, activation), *second)
    from mega_fairseq.ops.dense import triton  # here, since Triton may be missing

    dtype = cast_dtype(x)  # autocast's, if it is on
    tensors = (t.to(dtype) for t in (*first, *second))
    y, _ = triton.dense_twice(x.to(dtype).flatten(0, -2), *tensors, activation)
    return y.view(*x.shape[:-1], y.size(1))
