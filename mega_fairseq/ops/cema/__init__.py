"""Multi-dimensional complex exponential moving average, CEMA (Megalodon, Ma et al. 2024).

For each of D channels, with N complex states (x_t a scalar of that channel, n = 1 .. N):

    h_t = q . h_{t-1} + p x_t      p = alpha,  q_n = (1 - alpha_n delta_n) exp(i phi_n),  phi_n = 2 pi n theta / N
    y_t = Re(gamma^T h_t) / sqrt(N) + omega x_t

alpha, delta and theta are sigmoids of parameters. This is what the authors' code computes; the paper has no omega. The
forms are those of `ops/ema`, without truncation and for one direction:

    naive.py     the definition, step by step, and the step for single tokens
    blocks.py    the form for the CPU: blocks of C steps, with the same scan as the damped EMA
    triton.py    the form for NVIDIA GPUs, with the same kernels

All compute in float32, or float64 for coefficients in float64. Complex numbers are pairs of reals outside operators.
"""

import math
from typing import Any, Optional, Tuple

import torch
from torch import Tensor

from mega_fairseq.ops.backend import Forms
from mega_fairseq.ops.cema.blocks import cema_blocks, complex_step
from mega_fairseq.ops.cema.naive import CEMACoefficients, cema_naive, cema_step, complex_powers, zero_state
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
        return _cema(x, c, state, skip, lengths)


def _plain(x, c: CEMACoefficients, state, skip, lengths) -> Tuple[Tensor, Tensor]:
    if not _is_token(x, lengths):
        return cema_blocks(x, c, state, skip, lengths)
    y, state = cema_token(x[:, 0], c, zero_state(x, c) if state is None else state, skip)
    return y.unsqueeze(1), state


def _is_token(x: Tensor, lengths: Optional[Tensor]) -> bool:
    return x.size(1) == 1 and lengths is None


def _suits(x, c: CEMACoefficients, state, skip, lengths) -> bool:
    return not _is_token(x, lengths) and c.expand.size(-1) <= STATES_IN_REGISTERS


_cema = Forms(cema_naive, _plain, "mega_fairseq.ops.cema.triton:cema_triton", _suits)


def cema_token_naive(
    x: Tensor, c: CEMACoefficients, state: Tensor, skip: Optional[Tensor] = None, decay: Optional[Tensor] = None
) -> Tuple[Tensor, Tensor]:
    """One token, for decoding: x (B, D), state (B, D, N, 2) -> y (B, D) in x's dtype, next state.

    `decay` is q (D, N, 2), `complex_powers(c, 1)`, computed once per generation.
    """
    wide, decay = x.to(c.expand.dtype), complex_powers(c, 1) if decay is None else decay
    if torch.is_grad_enabled():
        y, state = cema_step(wide, c, decay, state)
    else:
        y, state = complex_step(wide, c.expand, c.project, decay, state)
    return (y if skip is None else torch.addcmul(y, skip, wide)).to(x.dtype), state


def _without_gradients(*_: Any) -> bool:
    return not torch.is_grad_enabled()


cema_token = Forms(cema_token_naive, triton="mega_fairseq.ops.cema.triton:cema_token", suits=_without_gradients)
