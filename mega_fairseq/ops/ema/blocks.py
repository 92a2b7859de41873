"""The damped EMA in blocks of C steps (`ops/block_scan`): its tables, and truncated kernels."""

from functools import partial
from typing import List, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mega_fairseq.ops.block_scan import (
    BLOCK,
    BlockTables,
    channels_first,
    channels_last,
    in_blocks,
    last_steps,
    pad_to_multiple,
    state_after,
)
from mega_fairseq.ops.diagonals import toeplitz_matrix
from mega_fairseq.ops.ema.naive import EMACoefficients, decayed, powers
from mega_fairseq.ops.padding import zeros_at_pads


def ema_blocks(
    x: Tensor,
    c: EMACoefficients,
    state: Optional[Tensor] = None,
    skip: Optional[Tensor] = None,
    truncation: Optional[int] = None,
    lengths: Optional[Tensor] = None,
) -> Tuple[Tensor, Optional[Tensor]]:
    """`ema` in blocks."""
    xs = zeros_at_pads(x, lengths)
    if truncation:
        y, end = _windows(xs, c, state, skip, truncation, lengths)
    else:
        y, end = in_blocks(xs, state, partial(_block_tables, c, skip), partial(decayed, c), lengths)
    return zeros_at_pads(y, lengths).to(x.dtype), end


def final_state(x: Tensor, c: EMACoefficients) -> Tensor:
    """The state of a causal EMA after x (B, L, D), from a state of zeros and without its outputs: (B, D, N)."""
    return state_after(x, partial(_block_tables, c, None), partial(decayed, c))


def _block_tables(c: EMACoefficients, skip: Optional[Tensor], size: int) -> BlockTables:
    reach = powers(c.log_decay, 0, size)  # (R, D, N, C): phi^t
    entering = c.expand.unsqueeze(-1) * reach  # what is left of an input after t steps
    taps = torch.matmul(c.project.unsqueeze(-2), entering).squeeze(-2)  # (R, D, C)
    present, past = taps[..., 0].sum(0), taps[0, :, 1:]
    if skip is not None:
        present = present + skip
    future = taps[1, :, 1:].flip(-1) if c.bidirectional else torch.zeros_like(past)
    # (D, 2C - 1): the weights of the inputs from C - 1 steps after an output to C - 1 steps before it
    within = toeplitz_matrix(torch.cat([future, present.unsqueeze(-1), past], -1), size, size)
    leaving = (c.project * torch.exp(c.log_decay)).unsqueeze(-1) * reach
    collect, spread = [entering[0].flip(-1), *entering[1:]], [leaving[0], *leaving[1:].flip(-1)]
    return BlockTables(within, _joined(collect).transpose(1, 2), _joined(spread), torch.exp(c.log_decay * size))


def _joined(tables: List[Tensor]) -> Tensor:
    return torch.cat(tables, 1) if len(tables) > 1 else tables[0]


# ---------------------------------------------------------------------------------------------- truncated kernels


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


def _windows(x, c: EMACoefficients, state, skip, truncation: int, lengths) -> Tuple[Tensor, Optional[Tensor]]:
    """The state (B, D, T - 1) holds the inputs that the taps still reach."""
    length = x.size(1)
    x = x.to(c.expand.dtype)
    window = x if state is None else torch.cat([state.transpose(1, 2), x], 1)  # (B, T - 1 + L, D)
    y = _cut_ema(window, c, 0, truncation)[:, window.size(1) - length :]
    end = None
    if c.bidirectional:
        y = y + _cut_ema(x.flip(1), c, 1, truncation).flip(1)
    else:
        lengths = None if lengths is None else lengths + (window.size(1) - length)
        end = last_steps(window, truncation - 1, lengths).transpose(1, 2).contiguous()  # a view would keep `window`
    return y if skip is None else y + skip * x, end


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
        tables = _block_tables(c, None, size)
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
