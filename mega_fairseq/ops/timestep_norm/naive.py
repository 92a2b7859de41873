"""The timestep norm by its definition: one token, and a loop over tokens."""

from typing import NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from mega_fairseq.ops.padding import padding_from_lengths
from mega_fairseq.ops.precision import at_least_float32, widest


class Statistics(NamedTuple):
    """Mean and variance of all numbers of each group so far."""

    count: Tensor  # (B,) int64, tokens
    mean: Tensor  # (B, G) in float64 where the device has it
    var: Tensor  # (B, G) likewise, the mean square distance from the mean


def no_statistics(x: Tensor, groups: int) -> Statistics:
    """Those before the first token of x (B, ...)."""
    mean = x.new_zeros(x.size(0), groups, dtype=widest(x.device))
    return Statistics(x.new_zeros(x.size(0), dtype=torch.long), mean, torch.ones_like(mean))


def own_statistics(x: Tensor, groups: int) -> Tuple[Tensor, Tensor, Tensor]:
    """x (..., D) centred in each group of each token (..., G, W), and the means and variances (..., G) of these groups.

    They are in float32 or better; variances are those of centred numbers, since squares of others lose their digits.
    """
    wide = x.to(at_least_float32(x.dtype)).unflatten(-1, (groups, -1))
    mean = wide.mean(-1, keepdim=True)
    centred = wide - mean
    return centred, mean.squeeze(-1), centred.square().mean(-1)


def norm_step(
    x: Tensor, weight: Optional[Tensor], bias: Optional[Tensor], state: Statistics, eps: float
) -> Tuple[Tensor, Statistics]:
    """One token: x (B, D) -> y (B, D) in x's dtype, and the statistics with it."""
    centred, own, spread = own_statistics(x, state.mean.size(1))
    count = state.count + 1
    share, away = 1.0 / count.unsqueeze(-1).to(state.mean.dtype), own - state.mean
    mean = state.mean + away * share
    var = state.var + (spread + (1.0 - share) * away.square() - state.var) * share
    y = (centred + (own - mean).to(own.dtype).unsqueeze(-1)) * torch.rsqrt(var + eps).to(own.dtype).unsqueeze(-1)
    y = y.flatten(-2)
    y = y if weight is None else y * (1.0 + weight.to(y.dtype))
    return (y if bias is None else y + bias).to(x.dtype), Statistics(count, mean, var)


def timestep_norm_naive(
    x: Tensor,
    weight: Optional[Tensor],
    bias: Optional[Tensor],
    state: Statistics,
    lengths: Optional[Tensor] = None,
    eps: float = 1e-5,
) -> Tuple[Tensor, Statistics]:
    """`timestep_norm`, token by token."""
    lengths = torch.full_like(state.count, x.size(1)) if lengths is None else lengths
    inside, ys = ~padding_from_lengths(lengths, x.size(1)), []  # (B, L)
    for token, real in zip(x.masked_fill(~inside.unsqueeze(-1), 0.0).unbind(1), inside.unbind(1)):
        y, after = norm_step(token, weight, bias, state, eps)
        real = real.unsqueeze(-1)
        state = Statistics(state.count + real.squeeze(-1), *(torch.where(real, *t) for t in zip(after[1:], state[1:])))
        ys.append(y.masked_fill(~real, 0.0))
    return torch.stack(ys, 1), state
