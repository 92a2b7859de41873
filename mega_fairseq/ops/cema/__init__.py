"""Multi-dimensional complex exponential moving average, CEMA (Megalodon, Ma et al. 2024).

For each of D channels, with N complex states (x_t a scalar of that channel, n = 1 .. N):

    h_t = q . h_{t-1} + p x_t      p = alpha,  q_n = (1 - alpha_n delta_n) exp(i phi_n),  phi_n = 2 pi n theta / N
    y_t = Re(gamma^T h_t) / sqrt(N) + omega x_t

alpha, delta and theta are sigmoids of parameters. This is what the authors' code computes; the paper has no omega. The
forms are those of `ops/ema`, without truncation and for one direction:

    naive.py             the definition, step by step
    ops/block_scan.py    the form for the CPU: blocks of C steps
    triton.py            the form for NVIDIA GPUs, with the kernels of the damped EMA
    token.py             single tokens

All compute in float32, or float64 for coefficients in float64. Complex numbers are pairs of reals outside operators.
"""

import math
from typing import Any, Optional, Tuple

import torch
from torch import Tensor

from mega_fairseq.ops.backend import Forms
from mega_fairseq.ops.block_scan import in_blocks
from mega_fairseq.ops.cema.coefficients import CEMACoefficients
from mega_fairseq.ops.cema.naive import cema_naive, zero_state
from mega_fairseq.ops.cema.token import cema_token
from mega_fairseq.ops.ema import STATES_IN_REGISTERS, ema_coefficients
from mega_fairseq.ops.precision import widest, without_autocast


def cema_coefficients(alpha: Tensor, delta: Tensor, theta: Tensor, gamma: Tensor) -> CEMACoefficients:
    """Computes the coefficients from the logits alpha and delta (D, N) and theta (D), and from gamma (D, N, 2).

    gamma is scaled by sqrt(1/N).
    """
    ndim, one = alpha.size(-1), torch.ones_like(alpha).unsqueeze(0)
    with without_autocast(alpha):
        log_decay, expand, _ = ema_coefficients(alpha.unsqueeze(0), delta.unsqueeze(0), one, one)  # as with beta = 1
        wide = widest(theta.device)
        parts = torch.linspace(1.0 / ndim, 1.0, ndim, device=theta.device, dtype=wide)  # n / N
        turns = torch.sigmoid(theta.to(wide)).unsqueeze(-1) * parts
        project = gamma.to(expand.dtype) * math.sqrt(1.0 / ndim)
        return CEMACoefficients(log_decay.squeeze(0), turns, expand.squeeze(0), project)


def cema(
    x: Tensor,
    c: CEMACoefficients,
    state: Optional[Tensor] = None,
    skip: Optional[Tensor] = None,
    lengths: Optional[Tensor] = None,
) -> Tuple[Tensor, Tensor]:
    """x (B, L, D) -> y (B, L, D) in x's dtype, and the state after it.

    `state` is (B, D, N, 2), real and imaginary part, zeros by default. `skip` (D) is omega. `lengths` (B,) marks right
    padding: padded outputs are zero and padded steps do not change the state.
    """
    with without_autocast(x):
        if x.size(1) == 1 and lengths is None:
            y, state = cema_token(x[:, 0], c, zero_state(x, c) if state is None else state, skip)
            return y.unsqueeze(1), state
        return _cema(x, c, state, skip, lengths)


def _suits(x: Tensor, c: CEMACoefficients, *_: Any) -> bool:
    return c.expand.size(-1) <= STATES_IN_REGISTERS


_cema = Forms(cema_naive, in_blocks, "mega_fairseq.ops.cema.triton:cema_triton", _suits)
