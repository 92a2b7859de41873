"""Timestep norm (Ma et al. 2024, Megalodon): group norm whose statistics are of all tokens so far.

With n tokens before the piece, and means m and variances v of the W numbers of a group of token t:

    n <- n + 1;   e = m - mean;   mean <- mean + e / n;   var <- var + (v + (1 - 1/n) e^2 - var) / n
    y = (x - mean) / sqrt(var + eps) * (1 + weight) + bias

`naive.py` is this loop. In sums.py, and in triton.py for NVIDIA GPUs, all tokens of a piece take their statistics from
prefix sums. With k tokens up to t, and sums over the piece up to t relative to s, the mean before the piece:

    mean = s + sum(m - s) / k;   var = (n var_before + sum(v + (m - s)^2)) / k - (mean - s)^2

Sums and statistics are in float64: in float32 the mean is wrong by 1e-3 after 100,000 tokens of mean 100 and deviation
1, and a state in bfloat16 stops changing after a few hundred tokens. They have one number for each group, so they cost
little. Apple's GPUs have float32 only; there, outputs after 100,000 tokens are wrong by 5e-6 in pieces of 512 and 8e-5
token by token if the mean is 10 deviations, and by 4e-5 and 4e-4 if it is 100.

The gradient is by hand. With torch's own, forward and backward keep 3.2 instead of 1.1 tensors of the size of x, and
take 1.9 times as long on a CPU (8,192 tokens of 512 numbers in 16 groups).
"""

from types import ModuleType
from typing import Any, List, Optional, Tuple

import torch
from torch import Tensor

from mega_fairseq.ops.backend import Forms
from mega_fairseq.ops.operators import operator
from mega_fairseq.ops.precision import widest
from mega_fairseq.ops.timestep_norm import sums
from mega_fairseq.ops.timestep_norm.naive import Statistics, own_statistics, timestep_norm_naive

WIDEST = 1024  # channels of a group in triton.py, which takes powers of two


def _by_operator(
    x: Tensor,
    weight: Optional[Tensor],
    bias: Optional[Tensor],
    state: Statistics,
    lengths: Optional[Tensor] = None,
    eps: float = 1e-5,
) -> Tuple[Tensor, Statistics]:
    y, _, _, mean, var = _norm(x, weight, bias, state.mean, state.var, state.count, lengths, eps)
    return y, Statistics(state.count + (x.size(1) if lengths is None else lengths), mean, var)


# x (B, L, D) after a state -> y (B, L, D) in x's dtype, and the statistics after it. `weight` (D,) is the scale minus
# 1. `lengths` (B,) marks right padding: padded outputs are zero and pads do not count.
timestep_norm = Forms(timestep_norm_naive, _by_operator)


def statistics(x: Tensor, groups: int) -> Statistics:
    """Those of x (B, L, D) alone."""
    _, own, spread = own_statistics(x, groups)
    own, spread = (t.to(widest(x.device)) for t in (own, spread))
    var = spread.mean(1) + own.var(1, correction=0)
    return Statistics(torch.full_like(own[:, 0, 0], x.size(1), dtype=torch.long), own.mean(1), var)


def merged(first: Statistics, second: Statistics) -> Statistics:
    """Those of two pieces together, in any order."""
    count = first.count + second.count
    share = (second.count / count.clamp_min(1).to(first.mean.dtype)).unsqueeze(-1)
    away = second.mean - first.mean
    mean = first.mean + share * away
    return Statistics(count, mean, torch.lerp(first.var, second.var, share) + share * (1.0 - share) * away.square())


# ---------------------------------------------------------------------------------------------- all tokens of a piece

FORMS = Forms(sums, triton="mega_fairseq.ops.timestep_norm.triton")


def _form(x: Tensor, mean: Tensor) -> ModuleType:
    """The one for this x (B, L, D) and means (B, G)."""
    width = x.size(2) // mean.size(1)
    return FORMS.of(x, suits=width <= WIDEST and not width & (width - 1))


def _forward(
    x: Tensor, weight: Optional[Tensor], bias: Optional[Tensor], mean: Tensor, *args: Any
) -> Tuple[Tensor, ...]:
    return _form(x, mean).forward(x, weight, bias, mean, *args)


def _backward(grads, saved, x, weight, bias, mean, *args: Any) -> List[Tensor]:
    return _form(x, mean).backward(grads, saved, x, weight, bias, mean, *args)


# x (B, L, D) -> y, the means and 1 / sqrt(var + eps) of each token (B, L, G), and the last means and variances (B, G).
_norm = operator(
    "timestep_norm(Tensor x, Tensor? weight, Tensor? bias, Tensor mean, Tensor var, Tensor count, Tensor? lengths, "
    "float eps) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _forward,
    sums.fake,
    _backward,
    saved=slice(1, 3),
    gradients=5,
)
