"""The damped EMA by its definition: one step, the kernel, and a loop over steps."""

from typing import Optional, Tuple

import torch
from torch import Tensor

from mega_fairseq.ops.ema.coefficients import EMACoefficients, powers
from mega_fairseq.ops.padding import padding_from_lengths


def ema_kernel_naive(c: EMACoefficients, length: int) -> Tensor:
    """The first `length` taps of the convolution kernel (eq. 25): (R, D, length)."""
    return ((c.expand * c.project).unsqueeze(-1) * powers(c.log_decay, 0, length)).sum(-2)


def ema_step(x: Tensor, c: EMACoefficients, state: Tensor) -> Tuple[Tensor, Tensor]:
    """One token of a causal EMA: x (B, D), state (B, D, N) -> y (B, D), next state."""
    state = torch.addcmul(c.expand * x.unsqueeze(-1), torch.exp(c.log_decay), state)
    return (state * c.project).sum(-1), state


def ema_window_step(x: Tensor, taps: Tensor, state: Tensor) -> Tuple[Tensor, Tensor]:
    """The same if truncated: taps (D, T), the oldest input's first, state (B, D, T - 1) -> y (B, D), next state."""
    window = torch.cat([state, x.unsqueeze(-1)], -1)  # (B, D, T)
    # Any other order of the factors, or a sum of products, takes the CPU four to twelve times as long.
    return torch.bmm(taps.unsqueeze(1), window.permute(1, 2, 0)).squeeze(1).t(), window[..., 1:]


def zero_state(x: Tensor, c: EMACoefficients, truncation: Optional[int] = None) -> Tensor:
    _, dim, ndim = c.expand.shape
    return c.expand.new_zeros(x.size(0), dim, truncation - 1 if truncation else ndim)


def ema_naive(
    x: Tensor,
    c: EMACoefficients,
    state: Optional[Tensor] = None,
    skip: Optional[Tensor] = None,
    lengths: Optional[Tensor] = None,
    truncation: Optional[int] = None,
) -> Tuple[Tensor, Optional[Tensor]]:
    """`ema`, step by step. In the backward direction padding comes first, where it does not change a state of zeros."""
    lengths = torch.full_like(x[:, 0, 0], x.size(1), dtype=torch.long) if lengths is None else lengths
    inside = ~padding_from_lengths(lengths, x.size(1))  # (B, L)
    xs = x.to(c.expand.dtype).masked_fill(~inside.unsqueeze(-1), 0.0)
    y, end = _steps(xs, inside, EMACoefficients(*(t[:1] for t in c)), state, truncation)
    if c.bidirectional:
        backward = EMACoefficients(*(t[1:] for t in c))
        y, end = y + _steps(xs.flip(1), inside.flip(1), backward, None, truncation)[0].flip(1), None
    if skip is not None:
        y = y + skip * xs
    return y.masked_fill(~inside.unsqueeze(-1), 0.0).to(x.dtype), end


def _steps(x: Tensor, inside: Tensor, c: EMACoefficients, state, truncation) -> Tuple[Tensor, Tensor]:
    state = zero_state(x, c, truncation) if state is None else state
    taps = ema_kernel_naive(c, truncation)[0].flip(-1) if truncation else None
    ys = []
    for t in range(x.size(1)):
        y, after = ema_window_step(x[:, t], taps, state) if truncation else ema_step(x[:, t], c, state)
        state = torch.where(inside[:, t, None, None], after, state)
        ys.append(y)
    return torch.stack(ys, 1), state
