"""Activation functions by their released names, with derivatives for operators that define their own backward."""

from typing import Callable, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_aten = torch.ops.aten
GELU_SIGMOID = 1.702  # x sigmoid(1.702 x) approximates gelu, in Sparse Transformers


class Activation(NamedTuple):
    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]  # (gradient, input) -> gradient of the input


def _gelu_sigmoid_backward(grad: Tensor, x: Tensor) -> Tensor:
    gate = torch.sigmoid(GELU_SIGMOID * x)
    return grad * gate * (1.0 + GELU_SIGMOID * x * (1.0 - gate))


def _gelu(approximate: str) -> Activation:
    return Activation(
        lambda x: F.gelu(x, approximate=approximate),
        lambda grad, x: _aten.gelu_backward(grad, x, approximate=approximate),
    )


ACTIVATIONS = {
    "silu": Activation(F.silu, lambda grad, x: _aten.silu_backward(grad, x)),
    "relu": Activation(torch.relu, lambda grad, x: _aten.threshold_backward(grad, x, 0)),
    "gelu": _gelu("none"),
    "gelu_fast": _gelu("tanh"),
    "gelu_accurate": _gelu("tanh"),
    "gelu_sigmoid": Activation(lambda x: x * torch.sigmoid(GELU_SIGMOID * x), _gelu_sigmoid_backward),
    "linear": Activation(lambda x: x, lambda grad, x: grad),
}
