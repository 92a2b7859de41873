"""The gates of Mega's output by their definition (eq. 12-15)."""

from typing import Callable, Optional

import torch
from torch import Tensor

from mega_fairseq.ops.activations import ACTIVATIONS

Projection = Callable[[Tensor], Tensor]
RESET_ACTIVATION = "silu"  # of the reset gate; triton.py has a kernel for each that it may be
RESET = ACTIVATIONS[RESET_ACTIVATION]


def gate_output_naive(
    update: Tensor,
    reset: Tensor,
    candidate: Optional[Tensor],
    attended: Tensor,
    residual: Tensor,
    hidden: Projection,
    activation: str = "silu",
    keep: Optional[Tensor] = None,
    scale: float = 1.0,
) -> Tensor:
    """Y from the projections of X' for u, r and H, before their activations; see `gated_output_naive`."""
    mixed = hidden(RESET.forward(reset) * attended)
    mixed = ACTIVATIONS[activation].forward(mixed if candidate is None else candidate + mixed)
    if keep is not None:
        mixed = mixed * keep * scale
    return torch.lerp(residual, mixed.to(residual.dtype), torch.sigmoid(update).to(residual.dtype))


def gated_output_naive(
    gate_input: Tensor,
    attended: Tensor,
    residual: Tensor,
    gates: Projection,
    hidden: Projection,
    activation: str = "silu",
    keep: Optional[Tensor] = None,
    scale: float = 1.0,
) -> Tensor:
    """Y = u H + (1 - u) X with the gates from one projection of X' (eq. 12-15), all (..., width):

    u = sigmoid(X' W_u + b_u), r = silu(X' W_r + b_r), H = activation(X' W_h + (r O) U_h + b_h).

    gates: X' to (u, r, H), D + E + D wide, or only to (u, r) if H does not depend on X' (cross attention); hidden: U_h
    with b_h. keep, scale: dropout on H. Y has the dtype of X, also under autocast.
    """
    dim, width = residual.size(-1), attended.size(-1)
    update, reset, candidate = gates(gate_input).tensor_split((dim, dim + width), -1)
    candidate = candidate if candidate.size(-1) else None
    return gate_output_naive(update, reset, candidate, attended, residual, hidden, activation, keep, scale)
