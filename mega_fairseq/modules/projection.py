"""Projections: their initialisation, and the fused and packed forms, which read weights instead of calling modules.

Such a form runs only where a projection is torch's own `nn.Linear`. A hook, a parametrisation, an adapter or a
quantised layer in its place always takes effect: then the same formula calls the module.
"""

from typing import Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mega_fairseq.ops.activations import ACTIVATIONS
from mega_fairseq.ops.gates import activated_linear, gated_linear, gated_output
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


def _weights(layer: nn.Linear) -> Tuple[Tensor, Tensor]:
    return layer.weight, layer.bias


def packed(*layers: nn.Module) -> Projection:
    """Layers of the same input side by side, (R, in) -> (R, all outputs): one product, packed for a few rows."""
    if is_plain(*layers):
        weights, biases = zip(*map(_weights, layers))
        return ready_linear(*(t[0] if len(t) == 1 else torch.cat(t) for t in (weights, biases)))
    return layers[0] if len(layers) == 1 else lambda x: torch.cat([layer(x) for layer in layers], -1)


def activated(layer: nn.Module, x: Tensor, activation: str = "silu") -> Tensor:
    """activation(x W^T + b): (B, L, D) -> (B, L, E)."""
    if is_plain(layer):
        return activated_linear(x, *_weights(layer), activation)
    return ACTIVATIONS[activation].forward(layer(x))


def gated(x: Tensor, attended: Tensor, gate: nn.Module, output: nn.Module, activation: str = "silu") -> Tensor:
    """(activation(x W + b) * O) W_o + b_o: x (B, L, D), O (B, L, E) -> (B, L, D)."""
    if is_plain(gate, output):
        return gated_linear(x, attended, _weights(gate), _weights(output), activation)
    return output(ACTIVATIONS[activation].forward(gate(x)) * attended)


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
    if is_plain(gates, hidden):
        return gated_output(x, attended, residual, _weights(gates), _weights(hidden), activation, keep, scale)
    dim, width = residual.size(-1), attended.size(-1)
    base = gates(x)
    candidate = hidden(F.silu(base[..., dim : dim + width]) * attended)
    if base.size(-1) > dim + width:
        candidate = candidate + base[..., dim + width :]
    candidate = ACTIVATIONS[activation].forward(candidate)
    if keep is not None:
        candidate = candidate * keep * scale
    return residual + torch.sigmoid(base[..., :dim]) * (candidate - residual)
