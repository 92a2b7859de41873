"""The complex EMA by its definition: one step, and a loop over steps."""

from typing import Optional, Tuple

import torch
from torch import Tensor

from mega_fairseq.ops.cema.coefficients import CEMACoefficients, complex_powers, complex_product
from mega_fairseq.ops.padding import padding_from_lengths


def cema_step(x: Tensor, c: CEMACoefficients, decay: Tensor, state: Tensor) -> Tuple[Tensor, Tensor]:
    """One token: x (B, D), decay q (D, N, 2), state (B, D, N, 2) -> y (B, D), next state."""
    entering = c.expand * x.unsqueeze(-1)
    state = complex_product(decay, state) + torch.stack([entering, torch.zeros_like(entering)], -1)
    return complex_product(c.project, state)[..., 0].sum(-1), state


def cema_naive(
    x: Tensor,
    c: CEMACoefficients,
    state: Optional[Tensor] = None,
    skip: Optional[Tensor] = None,
    lengths: Optional[Tensor] = None,
) -> Tuple[Tensor, Tensor]:
    """`cema`, step by step."""
    lengths = torch.full_like(x[:, 0, 0], x.size(1), dtype=torch.long) if lengths is None else lengths
    inside = ~padding_from_lengths(lengths, x.size(1))  # (B, L)
    xs = x.to(c.expand.dtype).masked_fill(~inside.unsqueeze(-1), 0.0)
    state, decay, ys = zero_state(x, c) if state is None else state, complex_powers(c, 1), []
    for t in range(x.size(1)):
        y, after = cema_step(xs[:, t], c, decay, state)
        state = torch.where(inside[:, t, None, None, None], after, state)
        ys.append(y if skip is None else y + skip * xs[:, t])
    return torch.stack(ys, 1).masked_fill(~inside.unsqueeze(-1), 0.0).to(x.dtype), state


def zero_state(x: Tensor, c: CEMACoefficients) -> Tensor:
    return c.project.new_zeros(x.size(0), *c.project.shape)
