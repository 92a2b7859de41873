"""The gates of Mega's output and gated projections as functions of named tensors, for tests of all their forms."""

from functools import partial
from typing import Callable, Dict, Optional, Tuple

import torch.nn.functional as F
from torch import Tensor

from mega_fairseq.ops.gates import gated_output, gated_output_naive


def shapes_of_gates(batch: int, length: int, dim: int, width: int, candidate: bool) -> Dict[str, Tuple[int, ...]]:
    """X', O, X and the weights; `candidate`: whether the candidate has a projection of X'."""
    rows = dim + width + (dim if candidate else 0)
    return {
        "gate_input": (batch, length, dim),
        "attended": (batch, length, width),
        "residual": (batch, length, dim),
        "weight": (rows, dim),
        "bias": (rows,),
        "hidden": (dim, width),
        "hidden_bias": (dim,),
    }


def fused(activation: str = "silu", keep: Optional[Tensor] = None, scale: float = 1.0) -> Callable[..., Tensor]:
    def function(gate_input, attended, residual, weight, bias, hidden, hidden_bias):
        gates = ((weight, bias), (hidden, hidden_bias))
        return gated_output(gate_input, attended, residual, *gates, activation, keep, scale)

    return function


def definition(activation: str = "silu", keep: Optional[Tensor] = None, scale: float = 1.0) -> Callable[..., Tensor]:
    def function(gate_input, attended, residual, weight, bias, hidden, hidden_bias):
        gates = (partial(F.linear, weight=w, bias=b) for w, b in ((weight, bias), (hidden, hidden_bias)))
        return gated_output_naive(gate_input, attended, residual, *gates, activation, keep, scale)

    return function


def of_gated(form: Callable[..., Tensor], activation: str = "silu") -> Callable[..., Tensor]:
    """A gated projection, with or without values and a bias."""
    return lambda x, gate, gate_bias, weight, values=None, bias=None: form(
        x, values, (gate, gate_bias), (weight, bias), activation
    )
