"""Multi-dimensional damped exponential moving average (paper, section 3.1 and appendix B, eq. 3-5 and 22-26).

For each of D channels, with an N-dimensional hidden state (x_t a scalar of that channel):

    h_t = phi . h_{t-1} + (alpha . beta) x_t          phi = 1 - alpha . delta       (eq. 4, 22)
    y_t = eta^T h_t + omega x_t                       omega: skip weight, not in the paper   (eq. 5)

which is also a convolution with the kernel K_t = sum_n eta_n alpha_n beta_n phi_n^t (eq. 25).

Five implementations of the same function, all computed in float32 (float64 for float64 inputs):

    ema_naive   step by step, as written above: the reference for tests
    ema_step    one token, for decoding
    ema_scan    blocks of C steps: a C x C Toeplitz product inside a block, N-dimensional states between blocks
    ema_fft     the convolution theorem, with a kernel from two levels of powers (`geometric_sum`): for truncated
                kernels in both directions, and a second reference for the others
    ema_window  a kernel of the first T taps only (truncation), applied to the current and the last T - 1 inputs;
                `ema_window_step` is its form for one token, with the taps computed beforehand

`ema` and `bidirectional_ema` choose between them. Sequences are batch-first (B, L, D) and right-padded; `lengths` are
their lengths without padding. A state is the hidden state (B, D, N), or the last inputs (B, D, T - 1) if truncated.
"""

from typing import Optional, Tuple

import torch
from torch import Tensor

from mega_fairseq.ops.ema.blocks import BLOCK, ema_scan, ema_scan_both, ema_window, ema_window_step, window_taps
from mega_fairseq.ops.ema.fft import ema_fft, ema_fft_both
from mega_fairseq.ops.ema.naive import (
    EMACoefficients,
    ema_coefficients,
    ema_kernel,
    ema_naive,
    ema_step,
    final_state,
    geometric_sum,
    no_skip,
    powers,
    zero_state,
)
from mega_fairseq.ops.padding import padding_from_lengths
from mega_fairseq.ops.precision import without_autocast

__all__ = [
    "BLOCK",
    "EMACoefficients",
    "bidirectional_ema",
    "ema",
    "ema_coefficients",
    "ema_fft",
    "ema_kernel",
    "ema_naive",
    "ema_scan",
    "ema_step",
    "ema_window",
    "ema_window_step",
    "final_state",
    "geometric_sum",
    "powers",
    "window_taps",
]


def ema(
    x: Tensor,
    c: EMACoefficients,
    state: Optional[Tensor] = None,
    skip: Optional[Tensor] = None,
    truncation: Optional[int] = None,
    lengths: Optional[Tensor] = None,
) -> Tuple[Tensor, Tensor]:
    """Causal EMA in the fastest form for these inputs: x (B, L, D) -> y (B, L, D) in x's dtype, final state.

    `skip` (D) is omega. `lengths` (B,) marks right padding: padded outputs are zero and padded steps do not change
    the state, so the final state of a row does not depend on the batch. `truncation` None or 0 means none.
    """
    dtype = x.dtype
    with without_autocast(x):
        padding = None if lengths is None else padding_from_lengths(lengths, x.size(1)).unsqueeze(-1)
        if padding is not None:
            x = x.masked_fill(padding, 0.0)
        if truncation:
            y, end = ema_window(x.to(c.log_decay.dtype), c, truncation, state, skip, lengths)
        elif x.size(1) == 1:
            token = x[:, 0].to(c.log_decay.dtype)
            y, end = ema_step(token, c, zero_state(x, c) if state is None else state)
            y = (y if skip is None else torch.addcmul(y, skip, token)).unsqueeze(1)
            end = end if lengths is None else final_state(x, c, state, lengths)
        else:
            y, end = ema_scan(x, c, state, skip, lengths)
        if padding is not None:
            y = y.masked_fill(padding, 0.0)
    return y.to(dtype), end


def bidirectional_ema(
    x: Tensor,
    c: EMACoefficients,
    backward: EMACoefficients,
    skip: Optional[Tensor] = None,
    truncation: Optional[int] = None,
    lengths: Optional[Tensor] = None,
) -> Tensor:
    """Sum of a forward and a backward EMA, both including lag 0: x (B, L, D) -> (B, L, D) in x's dtype."""
    dtype = x.dtype
    with without_autocast(x):
        padding = None if lengths is None else padding_from_lengths(lengths, x.size(1)).unsqueeze(-1)
        if padding is not None:
            x = x.masked_fill(padding, 0.0)
        skip = no_skip(c) if skip is None else skip
        if truncation:
            y = ema_fft_both(x.to(c.log_decay.dtype), c, backward, skip, truncation)
        else:
            y = ema_scan_both(x, c, backward, skip)
        if padding is not None:
            y = y.masked_fill(padding, 0.0)
    return y.to(dtype)
