"""A projection and its activation, y = f(x W^T + b), and a second one after it.

`dense_naive` is the definition, and the form for everything but training on NVIDIA GPUs, which is in triton.py.
"""

from typing import Any, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mega_fairseq.ops.activations import ACTIVATIONS
from mega_fairseq.ops.backend import Forms

Weights = Tuple[Tensor, Tensor]  # a weight and a bias


def dense_naive(x: Tensor, weight: Tensor, bias: Tensor, activation: str = "linear") -> Tensor:
    """f(x W^T + b): x (..., in), weight (out, in) -> (..., out)."""
    return ACTIVATIONS[activation].forward(F.linear(x, weight, bias))


def dense_twice_naive(x: Tensor, first: Weights, second: Weights, activation: str) -> Tensor:
    """f(x W_1^T + b_1) W_2^T + b_2. Training on GPUs saves only what is before f, and computes f again."""
    return dense_naive(dense_naive(x, *first, activation), *second)


def _in_training(*_: Any, **__: Any) -> bool:
    return torch.is_grad_enabled()


dense = Forms(dense_naive, triton="mega_fairseq.ops.dense.triton:dense", suits=_in_training)
dense_twice = Forms(dense_twice_naive, triton="mega_fairseq.ops.dense.triton:dense_twice", suits=_in_training)
