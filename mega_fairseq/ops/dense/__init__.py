"""A projection and its activation, y = f(x W^T + b).

`dense_naive` is the definition, and the form for everything but training on NVIDIA GPUs, which is in triton.py.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mega_fairseq.ops.activations import ACTIVATIONS
from mega_fairseq.ops.backend import Forms


def dense_naive(x: Tensor, weight: Tensor, bias: Tensor, activation: str = "linear") -> Tensor:
    """f(x W^T + b): x (..., in), weight (out, in) -> (..., out)."""
    return ACTIVATIONS[activation].forward(F.linear(x, weight, bias))


def _in_training(*_: Any, **__: Any) -> bool:
    return torch.is_grad_enabled()


dense = Forms(dense_naive, triton="mega_fairseq.ops.dense.triton:dense", suits=_in_training)
