"""A projection and its activation, y = f(x W^T + b).

`dense_naive` is the definition, and the form for everything but training on NVIDIA GPUs, which is in triton.py.
"""

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
