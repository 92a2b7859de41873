"""The gates of Mega's output (eq. 12-15).

naive.py     the definition: `gate_output`, from projections that were computed before, and `gated_output_naive`, which
             calls them
tiles.py     the form for the CPU: tiles of rows, with a gradient that stores no activation
triton.py    the form for NVIDIA GPUs: the elementwise parts as Triton kernels, with silu as activation
"""

from types import ModuleType
from typing import List, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mega_fairseq.ops.backend import NAIVE, TRITON, backend
from mega_fairseq.ops.derivatives import once_differentiable
from mega_fairseq.ops.gates import tiles
from mega_fairseq.ops.gates.naive import gate_output, gated_output_naive
from mega_fairseq.ops.precision import cast_dtype, without_autocast

__all__ = ["gate_output", "gated_output", "gated_output_naive"]


def gated_output(
    gate_input: Tensor,
    attended: Tensor,
    residual: Tensor,
    gates: Tuple[Tensor, Tensor],
    hidden: Tuple[Tensor, Tensor],
    activation: str = "silu",
    keep: Optional[Tensor] = None,
    scale: float = 1.0,
) -> Tensor:
    """`gated_output_naive` from the weights and biases of its projections: X', O, X (..., width) -> Y (..., D)."""
    if backend(residual.device) == NAIVE:
        projections = (lambda x: F.linear(x, *gates), lambda x: F.linear(x, *hidden))
        return gated_output_naive(gate_input, attended, residual, *projections, activation, keep, scale)
    dtype = cast_dtype(gate_input)  # autocast's, if it is on
    rows = (gate_input.to(dtype).flatten(0, -2), attended.to(dtype).flatten(0, -2), residual.flatten(0, -2))
    keep = None if keep is None else keep.expand(residual.shape).flatten(0, -2)
    y, _, _ = _gated_output(*rows, *(t.to(dtype) for t in (*gates, *hidden)), keep, scale, activation)
    return y.view(residual.shape)


def _form(residual: Tensor, activation: str) -> ModuleType:
    if activation == "silu" and backend(residual.device) == TRITON:
        from mega_fairseq.ops.gates import triton  # here, since Triton may be missing

        return triton
    return tiles


@torch.library.custom_op("mega::gated_output", mutates_args=())
def _gated_output(
    gate_input: Tensor,
    attended: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor,
    hidden: Tensor,
    hidden_bias: Tensor,
    keep: Optional[Tensor],
    scale: float,
    activation: str,
) -> Tuple[Tensor, Tensor, Tensor]:
    args = (gate_input, attended, residual, weight, bias, hidden, hidden_bias, keep, scale, activation)
    with without_autocast(residual):
        return _form(residual, activation).forward(*args)


@torch.library.custom_op("mega::gated_output_backward", mutates_args=())
def _gated_output_backward(
    dy: Tensor,
    gate_input: Tensor,
    attended: Tensor,
    residual: Tensor,
    weight: Tensor,
    hidden: Tensor,
    keep: Optional[Tensor],
    base: Tensor,
    before: Tensor,
    scale: float,
    activation: str,
) -> List[Tensor]:
    args = (dy, gate_input, attended, residual, weight, hidden, keep, base, before, scale, activation)
    with without_autocast(residual):
        return _form(residual, activation).backward(*args)


@_gated_output.register_fake
def _(gate_input, attended, residual, weight, bias, hidden, hidden_bias, keep, scale, activation):
    base = gate_input.new_empty(residual.size(0), weight.size(0))
    return torch.empty_like(residual), base, gate_input.new_empty(residual.shape)


@_gated_output_backward.register_fake
def _(dy, gate_input, attended, residual, weight, hidden, keep, base, before, scale, activation):
    biases = (weight.new_empty(t.size(0)) for t in (weight, hidden))
    dweight, dhidden = (t.new_empty(t.shape) for t in (weight, hidden))
    of_inputs = (torch.empty_like(t) for t in (gate_input, attended, residual))
    return [*of_inputs, dweight, next(biases), dhidden, next(biases)]


def _save(ctx, inputs, output):
    gate_input, attended, residual, weight, _, hidden, _, keep, *ctx.options = inputs
    ctx.save_for_backward(gate_input, attended, residual, weight, hidden, keep, *output[1:])
    ctx.set_materialize_grads(False)


@once_differentiable
def _gradients(ctx, dy, *_):
    return *_gated_output_backward(dy, *ctx.saved_tensors, *ctx.options), None, None, None


_gated_output.register_autograd(_gradients, setup_context=_save)
