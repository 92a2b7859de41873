"""Projections: their initialisation, and the fused and packed forms, which read weights instead of calling modules.

Such a form runs only where a projection is torch's own `nn.Linear` with plain weights. A hook, a parametrisation, an
adapter, a quantised layer in its place or quantised weights in it always take effect: then the same formula calls the
module.
"""

from typing import Optional, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from mega_fairseq.ops.activations import ACTIVATIONS
from mega_fairseq.ops.dense import dense
from mega_fairseq.ops.gates import gated_output, gated_output_naive
from mega_fairseq.ops.gates.projection import Weights, gated_projection
from mega_fairseq.ops.linear import Projection, ready_linear
from mega_fairseq.ops.log_probs import target_log_probs
from mega_fairseq.ops.operators import is_plain
from mega_fairseq.ops.precision import at_least_float32

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


def has_hooks(module: nn.Module) -> bool:
    """Whether a call of the module, or its backward pass, calls hooks: its own, or those of all modules."""
    own = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return bool(own) or bool(_has_any_global_hook())


def plain_weights(layer: nn.Module, kinds: Tuple[type, ...] = (nn.Linear,), biased: bool = False) -> Optional[Weights]:
    """The weight and bias of a projection if they may be read instead of calling it, otherwise None.

    A call is needed for other classes than `kinds` (adapters, quantised layers, parametrisations), hooks, also those of
    all modules, another `forward`, and weights that are not plain tensors (quantised or sharded ones). `biased`: None
    without a bias.
    """
    if type(layer) not in kinds or has_hooks(layer) or "forward" in layer.__dict__:
        return None
    weight, bias = layer.weight, getattr(layer, "bias", None)
    return (weight, bias) if is_plain(weight) and not (biased and bias is None) else None


def project(layer: nn.Module, x: Tensor, activation: str = "linear") -> Tensor:
    """The activation of layer(x): (..., in) -> (..., out)."""
    weights = plain_weights(layer, biased=True)
    if weights is not None:
        return dense(x, *weights, activation)
    return ACTIVATIONS[activation].forward(layer(x))


def project_gated(gate: nn.Module, output: nn.Module, x: Tensor, values: Optional[Tensor], activation: str) -> Tensor:
    """output(f(gate(x)) * values) for an activation f, or output(f(gate(x)))."""
    weights = plain_weights(gate, biased=True), plain_weights(output)
    if all(weights):
        return gated_projection(x, values, *weights, activation)
    hidden = project(gate, x, activation)
    return project(output, hidden if values is None else hidden * values)


def packed(*layers: nn.Module) -> Projection:
    """Layers of the same input side by side, (R, in) -> (R, all outputs): one product, packed for a few rows."""
    found = [plain_weights(layer) for layer in layers]
    if not all(found):
        return layers[0] if len(layers) == 1 else lambda x: torch.cat([layer(x) for layer in layers], -1)
    if len(layers) == 1:
        return ready_linear(*found[0])
    return ready_linear(torch.cat([weight for weight, _ in found]), _biases(found))


def projected_log_probs(
    layers: Sequence[nn.Module], x: Tensor, targets: Tensor, kinds: Tuple[type, ...] = (nn.Linear,)
) -> Tensor:
    """log softmax of the outputs of layers side by side, at the targets: x (T, D), targets (T,) -> (T,) in float32."""
    found = [plain_weights(layer, kinds) for layer in layers]
    if all(found):
        return target_log_probs(x, [weight for weight, _ in found], targets, _biases(found))
    scores = torch.cat([layer(x) for layer in layers], -1)
    return -F.cross_entropy(scores.to(at_least_float32(scores.dtype)), targets, reduction="none")


def _biases(found: Sequence[Weights]) -> Optional[Tensor]:
    """The biases side by side, with zeros for missing ones."""
    if all(bias is None for _, bias in found):
        return None
    return torch.cat([weight.new_zeros(len(weight)) if bias is None else bias for weight, bias in found])


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
    weights = plain_weights(gates, biased=True), plain_weights(hidden, biased=True)
    if all(weights):
        return gated_output(x, attended, residual, *weights, activation, keep, scale)
    return gated_output_naive(x, attended, residual, gates, hidden, activation, keep, scale)
