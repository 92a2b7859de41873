"""Multi-dimensional damped exponential moving average (paper, section 3.1 and appendix B, eq. 3-5 and 22-26).

For each of D channels, with an N-dimensional hidden state (x_t a scalar of that channel):

    h_t = phi . h_{t-1} + (alpha . beta) x_t          phi = 1 - alpha . delta       (eq. 4, 22)
    y_t = eta^T h_t + omega x_t                       omega: skip weight, not in the paper   (eq. 5)

which is also a convolution with the kernel K_t = sum_n eta_n alpha_n beta_n phi_n^t (eq. 25). With two directions, the
output is the sum of the EMA of x and of the EMA of x reversed in time, both including lag 0.

    naive.py               the definition, step by step, and the steps for single tokens
    ops/block_scan.py      the form for the CPU: blocks of C steps, a C x C Toeplitz product inside a block and
                           N-dimensional states between blocks
    windows.py             truncated kernels: sums over windows
    triton.py              the form for NVIDIA GPUs, with kernels.py and coefficient_kernels.py: segments of T steps in
                           parallel

All compute in float32, or float64 for coefficients in float64.
"""

from typing import Any, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mega_fairseq.ops.backend import Forms
from mega_fairseq.ops.block_scan import in_blocks
from mega_fairseq.ops.ema.coefficients import EMACoefficients, ema_coefficients_naive
from mega_fairseq.ops.ema.naive import ema_naive, ema_step, ema_window_step, zero_state
from mega_fairseq.ops.ema.windows import ema_windows, window_taps
from mega_fairseq.ops.precision import without_autocast

STATES_IN_REGISTERS = 16  # of a channel, for the Triton kernels, which hold them in one thread


def _few_states(alpha: Tensor, *_: Any, **__: Any) -> bool:
    return alpha.size(-1) <= STATES_IN_REGISTERS


ema_coefficients = Forms(
    ema_coefficients_naive, triton="mega_fairseq.ops.ema.triton:ema_coefficients_triton", suits=_few_states
)


def ema(
    x: Tensor,
    c: EMACoefficients,
    state: Optional[Tensor] = None,
    skip: Optional[Tensor] = None,
    lengths: Optional[Tensor] = None,
    truncation: Optional[int] = None,
) -> Tuple[Tensor, Optional[Tensor]]:
    """x (B, L, D) -> y (B, L, D) in x's dtype, and the state after it; None for two directions, which have no state.

    `state` is (B, D, N), zeros by default. `skip` (D) is omega. `lengths` (B,) marks right padding: padded outputs are
    zero and padded steps do not change the state, so that results of a row do not depend on the batch. `truncation` T
    keeps the first T taps of each kernel; the state then has the last inputs, (B, D, T - 1). None or 0 keep all.
    """
    with without_autocast(x):
        if x.size(1) == 1 and lengths is None and not c.bidirectional:
            state = zero_state(x, c, truncation) if state is None else state
            y, state = ema_token(x[:, 0], c, state, skip, window_taps(c, truncation) if truncation else None)
            return y.unsqueeze(1), state
        if truncation:
            return _truncated(x, c, state, skip, lengths, truncation)
        return _whole(x, c, state, skip, lengths)


def _suits(x: Tensor, c: EMACoefficients, *_: Any) -> bool:
    return _few_states(c.expand)


_whole = Forms(ema_naive, in_blocks, "mega_fairseq.ops.ema.triton:ema_triton", _suits)
_truncated = Forms(ema_naive, ema_windows)


def ema_token_naive(
    x: Tensor,
    c: EMACoefficients,
    state: Tensor,
    skip: Optional[Tensor] = None,
    taps: Optional[Tensor] = None,
    silu: bool = False,
) -> Tuple[Tensor, Tensor]:
    """One token of a causal EMA, for decoding: x (B, D), state -> y or silu(y) (B, D) in x's dtype, next state.

    `taps` are those of a truncated EMA, `window_taps(c, truncation)`, computed once per generation.
    """
    wide = x.to(c.expand.dtype)
    y, state = ema_step(wide, c, state) if taps is None else ema_window_step(wide, taps, state)
    y = (y if skip is None else torch.addcmul(y, skip, wide)).to(x.dtype)
    return F.silu(y) if silu else y, state


def _suits_token(x, c: EMACoefficients, state, skip=None, taps=None, silu=False) -> bool:
    return taps is None and not torch.is_grad_enabled()


ema_token = Forms(ema_token_naive, triton="mega_fairseq.ops.ema.triton:ema_token", suits=_suits_token)
