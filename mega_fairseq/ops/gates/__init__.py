"""The gates of Mega's output (eq. 12-15).

naive.py     the definition: `gate_output_naive`, from projections that were computed before, and `gated_output_naive`,
             which calls them
tiles.py     the form for the CPU: tiles of rows, with a gradient that stores no activation
triton.py    the form for NVIDIA GPUs: the elementwise parts as Triton kernels, with silu as activation
projection.py  the part of it that other gated layers have, `gated_projection`
"""

from types import ModuleType
from typing import Any, List, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mega_fairseq.ops.backend import Forms
from mega_fairseq.ops.gates import tiles
from mega_fairseq.ops.gates.naive import gate_output_naive, gated_output_naive
from mega_fairseq.ops.gates.projection import FORMS
from mega_fairseq.ops.gates.tiles import Rows
from mega_fairseq.ops.operators import operator
from mega_fairseq.ops.precision import cast_dtype


def _suits_gate_output(update, reset, candidate, attended, residual, hidden, activation="silu") -> bool:
    return not torch.is_grad_enabled() and activation == "silu"


# `gate_output_naive` for single tokens (R, width).
gate_output = Forms(gate_output_naive, triton="mega_fairseq.ops.gates.triton:gate_output", suits=_suits_gate_output)


def _by_definition(gate_input: Tensor, attended: Tensor, residual: Tensor, *weights_and_options: Any) -> Tensor:
    """X', O, X (..., width) -> Y (..., D), from the weights and biases of the projections."""
    gates, hidden, *options = weights_and_options
    projections = (lambda x: F.linear(x, *gates), lambda x: F.linear(x, *hidden))
    return gated_output_naive(gate_input, attended, residual, *projections, *options)


def _by_operator(
    gate_input: Tensor,
    attended: Tensor,
    residual: Tensor,
    gates: Tuple[Tensor, Tensor],
    hidden: Tuple[Tensor, Tensor],
    activation: str = "silu",
    keep: Optional[Tensor] = None,
    scale: float = 1.0,
) -> Tensor:
    dtype = cast_dtype(gate_input)  # autocast's, if it is on
    rows = (gate_input.to(dtype).flatten(0, -2), attended.to(dtype).flatten(0, -2), residual.flatten(0, -2))
    keep = None if keep is None else keep.expand(residual.shape).flatten(0, -2)
    y, _, _ = _gated_output(*rows, *(t.to(dtype) for t in (*gates, *hidden)), keep, scale, activation)
    return y.view(residual.shape)


gated_output = Forms(_by_definition, _by_operator)


def _form(rows: Rows) -> ModuleType:
    return FORMS.of(rows.residual, suits=rows.activation == "silu")


def _forward(*args: Any) -> Tuple[Tensor, Tensor, Tensor]:
    rows = Rows(*args)
    return _form(rows).forward(rows)


def _backward(grads: Sequence[Tensor], saved: Sequence[Tensor], *args: Any) -> List[Tensor]:
    rows = Rows(*args)
    return _form(rows).backward(grads[0], rows, *saved)


def _fake(*args: Any) -> Tuple[Tensor, Tensor, Tensor]:
    return tiles.empty(Rows(*args))


# Y, the projection of X', and the candidate before its activation, if it is not in there: saved for backward.
_gated_output = operator(
    "gated_residual(Tensor gate_input, Tensor attended, Tensor residual, Tensor weight, Tensor bias, Tensor hidden, "
    "Tensor hidden_bias, Tensor? keep, float scale, str activation) -> (Tensor, Tensor, Tensor)",
    _forward,
    _fake,
    _backward,
)
