"""The complex EMA by its definition: coefficients, one step, and a loop over steps."""

import math
from typing import NamedTuple, Optional, Tuple, Union

import torch
from torch import Tensor

from mega_fairseq.ops.padding import padding_from_lengths
from mega_fairseq.ops.turns import fraction_of_turn


class CEMACoefficients(NamedTuple):
    """The coefficients of the recurrence for each of D channels and N states, in float32 or float64."""

    log_decay: Tensor  # (D, N) log |q|, finite and <= 0
    turns: Tensor  # (D, N) the angle of q in whole turns, phi / (2 pi), in float64 where the device has it
    expand: Tensor  # (D, N) p: from an input to the state
    project: Tensor  # (D, N, 2) gamma / sqrt(N): from the state to an output, real and imaginary part


def complex_powers(c: CEMACoefficients, steps: Union[int, Tensor]) -> Tensor:
    """q^steps: steps that broadcast with (D, N) -> (..., D, N, 2), real and imaginary part.

    Angles are rounded once, as fractions of a turn.
    """
    angle = (fraction_of_turn(c.turns, steps) * (2.0 * math.pi)).to(c.expand.dtype)
    direction = torch.stack([torch.cos(angle), torch.sin(angle)], -1)
    return torch.exp(c.log_decay * steps).unsqueeze(-1) * direction


def complex_product(a: Tensor, b: Tensor) -> Tensor:
    """The product of complex numbers in pairs of reals, (..., 2)."""
    (a_real, a_imag), (b_real, b_imag) = a.unbind(-1), b.unbind(-1)
    return torch.stack([a_real * b_real - a_imag * b_imag, a_real * b_imag + a_imag * b_real], -1)


def decayed(c: CEMACoefficients, state: Tensor, steps: Union[int, Tensor]) -> Tensor:
    """What is left of a state (..., D, N, 2) after so many steps."""
    return complex_product(complex_powers(c, steps), state)


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
