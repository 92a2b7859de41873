"""Projections: their initialisation, and the fused and packed forms, which read weights instead of calling modules.

Such a form runs only where a projection is torch's own `nn.Linear`. A hook, a parametrisation, an adapter or a
quantised layer in its place always takes effect: then the same formula calls the module.
"""

from typing import Optional, Tuple

import torch
from torch import Tensor, nn

from mega_fairseq.ops.activations import ACTIVATIONS
from mega_fairseq.ops.dense import dense, dense_twice
from mega_fairseq.ops.gates import gated_output, gated_output_naive
from mega_fairseq.ops.gates.projection import gated_projection
from mega_fairseq.ops.linear import Projection, ready_linear

# N(0, 0.02) for all, including kappa, as in the release; or N(0, 1/in) with kappa = 1, so that scores start at order 1.
# The released scale is for widths of at least 512 and hundreds of thousands of updates: docs/results.md shows its
# effect on a small model after a thousand updates.
INITS = ("released", "scaled")
RELEASED_STD = 0.02


def linear(in_dim: int, out_dim: int, init: str = "released") -> nn.Linear:
    """A projection with weights N(0, 0.02) or N(0, 1/in) and bias 0."""
    layer = nn.Linear(in_dim, out_dim)
    nn.init.normal_(layer.weight, std=RELEASED_STD if init == "released" else in_dim**-0.5)
    nn.init.zeros_(layer.bias)
    return layer


def is_plain(*modules: nn.Module) -> bool:
    """Whether all are `nn.Linear` without hooks, parametrisations or another forward, so that weights may be read."""
    return all(
        type(m) is nn.Linear
        and not (m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks)
        and "forward" not in m.__dict__
        for m in modules
    )


def _weights(layer: nn.Linear) -> Tuple[Tensor, Optional[Tensor]]:
    return layer.weight, layer.bias


def project(layer: nn.Module, x: Tensor, activation: str = "linear") -> Tensor:
    """The activation of layer(x): (..., in) -> (..., out)."""
    if is_plain(layer) and layer.bias is not None:
        return dense(x, *_weights(layer), activation)
    return ACTIVATIONS[activation].forward(layer(x))


def project_twice(first: nn.Module, second: nn.Module, x: Tensor, activation: str) -> Tensor:
    """second(f(first(x))) for an activation f."""
    if is_plain(first, second) and first.bias is not None and second.bias is not None:
        return dense_twice(x, _weights(first), _weights(second), activation)
    return project(second, project(first, x, activation))


def project_gated(gate: nn.Module, output: nn.Module, x: Tensor, values: Tensor, activation: str) -> Tensor:
    """output(f(gate(x)) * values) for an activation f."""
    if is_plain(gate, output) and gate.bias is not None:
        return gated_projection(x, values, _weights(gate), _weights(output), activation)
    return project(output, project(gate, x, activation) * values)


def packed(*layers: nn.Module) -> Projection:
    """Layers of the same input side by side, (R, in) -> (R, all outputs): one product, packed for a few rows."""
    if not is_plain(*layers):
        return layers[0] if len(layers) == 1 else lambda x: torch.cat([layer(x) for layer in layers], -1)
    if len(layers) == 1:
        return ready_linear(*_weights(layers[0]))
    weight = torch.cat([layer.weight for layer in layers])
    biases = [layer.weight.new_zeros(len(layer.weight)) if layer.bias is None else layer.bias for layer in layers]
    return ready_linear(weight, torch.cat(biases))


def gated_residual(
    x: Tensor,
    attended: Tensor,
    residual: Tensor,
    gates: nn.Module,
    hidden: nn.Module,
    activation: str,
    keep: Optional[Tensor],
    scale: float,
) -> Tensor:
    """`gated_output` (eq. 12-15), with gates of x: x, residual (B, L, D), O (B, L, v) -> (B, L, D)."""
    if is_plain(gates, hidden) and gates.bias is not None and hidden.bias is not None:
        return gated_output(x, attended, residual, _weights(gates), _weights(hidden), activation, keep, scale)
    return gated_output_naive(x, attended, residual, gates, hidden, activation, keep, scale)
