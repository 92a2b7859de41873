"""The damped EMA with truncated kernels, as sums over windows of T steps."""

from typing import Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mega_fairseq.ops.block_scan import BLOCK, channels_first, channels_last, last_steps, pad_to_multiple
from mega_fairseq.ops.diagonals import toeplitz_matrix
from mega_fairseq.ops.ema.coefficients import EMACoefficients, powers
from mega_fairseq.ops.padding import zeros_at_pads


def ema_kernel(c: EMACoefficients, length: int) -> Tensor:
    """The first `length` taps of the convolution kernel (eq. 25): (R, D, length).

    phi^(aC+b) = (phi^C)^a phi^b: two short tables of powers and one small batched matrix product replace a
    D x N x length tensor and as many exponentials.
    """
    inner = min(length, BLOCK)
    coarse = powers(c.log_decay * inner, 0, -(-length // inner)).transpose(-1, -2)  # (R, D, A, N)
    rows = (c.expand * c.project).unsqueeze(-2) * coarse
    return torch.matmul(rows, powers(c.log_decay, 0, inner)).flatten(-2)[..., :length]


def window_taps(c: EMACoefficients, truncation: int) -> Tensor:
    """The taps of a truncated causal EMA for `ema_window_step`, the oldest input's tap first: (D, T)."""
    return ema_kernel(c, truncation)[0].flip(-1)


def ema_windows(
    x: Tensor,
    c: EMACoefficients,
    state: Optional[Tensor],
    skip: Optional[Tensor],
    lengths: Optional[Tensor],
    truncation: int,
) -> Tuple[Tensor, Optional[Tensor]]:
    """`ema` with truncation: the state (B, D, T - 1) holds the inputs that the taps still reach."""
    length, dtype = x.size(1), x.dtype
    x = zeros_at_pads(x, lengths).to(c.expand.dtype)
    window = x if state is None else torch.cat([state.transpose(1, 2), x], 1)  # (B, T - 1 + L, D)
    y = _cut_ema(window, c, 0, truncation)[:, window.size(1) - length :]
    end = None
    if c.bidirectional:
        y = y + _cut_ema(x.flip(1), c, 1, truncation).flip(1)
    else:
        ends = None if lengths is None else lengths + (window.size(1) - length)
        end = last_steps(window, truncation - 1, ends).transpose(1, 2).contiguous()  # a view would keep `window`
    y = y if skip is None else y + skip * x
    return zeros_at_pads(y, lengths).to(dtype), end


def _cut_ema(x: Tensor, c: EMACoefficients, direction: int, taps: int) -> Tensor:
    """The EMA of T taps in blocks: Toeplitz products for the first and last lags, states for those in between.

    Outputs depend on the T inputs within reach and on no others. Cheaper methods do not achieve this: through the
    rounding of an FFT, a large input changes earlier outputs; an EMA minus its delayed copy keeps rounding errors of
    inputs out of reach.
    """
    c = EMACoefficients(*(t[direction : direction + 1] for t in c))
    size = min(x.size(1), taps, BLOCK)
    padded = pad_to_multiple(x, size)
    xs = channels_first(padded, size, x.dtype).view(x.size(2), x.size(0), -1, size)  # (D, B, K, C)
    kernel = F.pad(ema_kernel(c, taps)[0], (size - 1, 2 * size))
    whole = max(0, taps // size - 1)  # earlier blocks that the taps cover completely
    cut = [0, *range(whole + 1, (taps + size - 2) // size + 1)]
    y = sum(
        torch.matmul(
            _shifted(xs, j), toeplitz_matrix(kernel[:, j * size : (j + 2) * size - 1], size, size).unsqueeze(1)
        )
        for j in cut
        if j < xs.size(2)
    )
    if whole:
        tables = c.block_tables(size)
        u = torch.matmul(xs, tables.collect.unsqueeze(1))  # (D, B, K, N)
        states = _shifted(_sliding_sum(u, tables.decay[0], whole), 1)
        y = y + torch.matmul(states, tables.spread.unsqueeze(1))
    return channels_last(y, padded)[:, : x.size(1)]


def _shifted(blocks: Tensor, count: int) -> Tensor:
    """Each block replaced by the block `count` before it, zeros first: (D, B, K, .) -> (D, B, K, .)."""
    return F.pad(blocks[:, :, : max(0, blocks.size(2) - count)], (0, 0, min(count, blocks.size(2)), 0))


def _sliding_sum(u: Tensor, decay: Tensor, width: int) -> Tensor:
    """sum over j < width of decay^j u_{k-j}, by doubling, without subtraction: u (D, B, K, N), decay (D, N)."""
    decay = decay[:, None, None]
    total, part, size = torch.zeros_like(u), u, 1
    while size <= width:
        if width & size:
            total = part + decay * _shifted(total, size)
        part, decay, size = part + decay * _shifted(part, size), decay * decay, 2 * size
    return total
