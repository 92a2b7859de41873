"""The damped EMA in blocks of C steps: Toeplitz products inside blocks, N states per channel between blocks."""

from functools import partial
from typing import NamedTuple, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mega_fairseq.ops.derivatives import once_differentiable
from mega_fairseq.ops.diagonals import toeplitz_matrix
from mega_fairseq.ops.ema.naive import (
    EMACoefficients,
    collecting,
    ema_kernel,
    end_aligned,
    final_state,
    no_skip,
    powers,
    spreading,
    zero_state,
)
from mega_fairseq.ops.precision import is_compiling, without_autocast

# Measured by `python benchmarks/layer.py --tables forms` (docs/performance.md, "The EMA alone").
BLOCK = 64  # steps in a block on the CPU: a larger one has more Toeplitz work, fewer scan steps and states
BLOCK_GPU = 128  # fewer, larger products, since each launch costs time; chosen by launch count, not measured on a GPU


class _BlockTables(NamedTuple):
    """The recurrence over C steps at once; M = N states per channel, or 2N for both directions.

    A single block without a state before it needs `within` only.
    """

    within: Tensor  # (D, C, C): from an input to the outputs of its block
    collect: Optional[Tensor] = None  # (D, C, M): from an input to the state after its block
    spread: Optional[Tensor] = None  # (D, M, C): from the state before a block to its outputs
    decay: Optional[Tensor] = None  # (D, M): phi^C


class _Direction(NamedTuple):
    """One direction in time, whose tables all come from one table of powers."""

    c: EMACoefficients
    reach: Tensor  # (D, N, C): phi^t
    entering: Tensor  # (D, N, C): what is left of an input after t steps

    @classmethod
    def of(cls, c: EMACoefficients, size: int) -> "_Direction":
        reach = powers(c.log_decay, 0, size)
        return cls(c, reach, c.expand.unsqueeze(-1) * reach)

    def taps(self) -> Tensor:
        """The first C taps of the kernel: (D, C)."""
        return torch.bmm(self.c.project.unsqueeze(1), self.entering).squeeze(1)

    def between_blocks(self) -> Tuple[Tensor, Tensor, Tensor]:
        """`collect`, `spread` and `decay` of `_BlockTables`."""
        spread = (self.c.project * torch.exp(self.c.log_decay)).unsqueeze(-1) * self.reach
        decay = torch.exp(self.c.log_decay * self.reach.size(-1))
        return self.entering.flip(-1).transpose(1, 2), spread, decay


def _block_tables(size: int, one_block: bool, skip: Tensor, *coefficients: Tensor) -> _BlockTables:
    """From the coefficients of one direction or of both, (D, N) each."""
    ahead = _Direction.of(EMACoefficients(*coefficients[:3]), size)
    back = _Direction.of(EMACoefficients(*coefficients[3:]), size) if coefficients[3:] else None
    taps = ahead.taps()
    present, past = taps[:, :1] + skip.unsqueeze(-1), taps[:, 1:]
    future = torch.zeros_like(past)
    if back is not None:
        taps = back.taps()
        present, future = present + taps[:, :1], taps[:, 1:].flip(-1)
    # (D, 2C - 1): the weights of the inputs from C - 1 steps after an output to C - 1 steps before it
    within = toeplitz_matrix(torch.cat([future, present, past], -1), size, size)
    if one_block:
        return _BlockTables(within)
    collect, spread, decay = ahead.between_blocks()
    if back is not None:
        collect_back, spread_back, decay_back = back.between_blocks()
        collect = torch.cat([collect, collect_back.flip(1)], 2)
        spread = torch.cat([spread, spread_back.flip(-1)], 1)
        decay = torch.cat([decay, decay_back], -1)
    return _BlockTables(within, collect, spread, decay)


def _scan(u: Tensor, decay: Tensor, first: Optional[Tensor], reverse: bool = False) -> Tensor:
    """h_{k+1} = decay h_k + u_k along dim 0: u (K, B, D, N) -> the state before each k (after it, if reverse)."""
    h = torch.zeros_like(u[0]) if first is None else first
    out = torch.empty_like(u)
    for k in range(u.size(0) - 1, -1, -1) if reverse else range(u.size(0)):
        out[k] = h
        h = torch.addcmul(u[k], decay, h)
    return out


def _scan_by_doubling(u: Tensor, decay: Tensor, first: Optional[Tensor], reverse: bool = False) -> Tensor:
    """`_scan` in log2 K steps over all of u: more work, but few kernel launches and no in-place operation."""
    if reverse:
        return _scan_by_doubling(u.flip(0), decay, first).flip(0)
    h = torch.cat([(torch.zeros_like(u[0]) if first is None else first).unsqueeze(0), u[:-1]])
    stride = 1
    while stride < h.size(0):
        h = torch.cat([h[:stride], torch.addcmul(h[stride:], decay, h[:-stride])])
        decay, stride = decay * decay, stride * 2
    return h


def _enter_blocks(xs: Tensor, t: _BlockTables, initial: Tensor, blocks: int) -> Tensor:
    """The state before each block: xs (D, B K, C) -> (K, B, D, M), forward states first."""
    batch, dim, forward = initial.shape
    scan = _scan if xs.device.type == "cpu" and not is_compiling() else _scan_by_doubling
    u = torch.bmm(xs, t.collect).view(dim, batch, blocks, -1).permute(2, 1, 0, 3)  # (K, B, D, M)
    ahead = scan(u[..., :forward], t.decay[:, :forward], initial)
    if u.size(-1) == forward:
        return ahead
    return torch.cat([ahead, scan(u[..., forward:], t.decay[:, forward:], None, reverse=True)], -1)


def _channels_first(x: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """(B, K C, D) -> (D, B K, C) in `dtype`. A transposed 2-D copy is four times as fast as a permuted 3-D one."""
    return _transposed(x.reshape(-1, x.size(-1)), dtype).view(x.size(-1), -1, size)


def _channels_last(xs: Tensor, batch: int, dtype: torch.dtype) -> Tensor:
    """(D, B K, C) -> (B, K C, D) in `dtype`."""
    return _transposed(xs.view(xs.size(0), -1), dtype).view(batch, -1, xs.size(0))


def _transposed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A contiguous copy. A GPU converts and transposes in one pass; the CPU is faster in two."""
    if x.device.type == "cpu" or is_compiling():
        return x.to(dtype).t().contiguous()
    return x.new_empty(x.size(1), x.size(0), dtype=dtype).copy_(x.t())


def _block_scan(x: Tensor, t: _BlockTables, initial: Optional[Tensor]) -> Tuple[Tensor, Optional[Tensor]]:
    """(x, tables, initial state) -> y in x's dtype, the states before the blocks, (K, B, D, M); L is a multiple of C.

    Inside, channels come first, so that every product is a batched matrix product over channels.
    """
    size, dtype = t.within.size(1), t.within.dtype
    xs = _channels_first(x, size, dtype)
    if initial is None:  # one block, such as most sentences
        return _channels_last(torch.bmm(xs, t.within), x.size(0), x.dtype), None
    enter = _enter_blocks(xs, t, initial, x.size(1) // size)
    h = enter.permute(2, 1, 0, 3).reshape(x.size(2), xs.size(1), -1)  # (D, B K, M)
    return _channels_last(torch.baddbmm(torch.bmm(h, t.spread), xs, t.within), x.size(0), x.dtype), enter


def _block_scan_backward(
    dy: Tensor, dlast: Optional[Tensor], x: Tensor, t: _BlockTables, enter: Optional[Tensor]
) -> Tuple[Optional[Tensor], ...]:
    """The gradients of x, of the initial state and of each table."""
    size, dtype = t.within.size(1), t.within.dtype
    dys, xt = _channels_first(dy, size, dtype), _channels_first(x, size, dtype).transpose(1, 2)  # (D, B K, C), its ^T
    if enter is None:
        dxs = torch.bmm(dys, t.within.transpose(1, 2))
        return _channels_last(dxs, x.size(0), x.dtype), None, torch.bmm(xt, dys)
    (dim, _, states), forward = t.collect.shape, dlast.size(-1)
    scan = _scan if x.device.type == "cpu" else _scan_by_doubling
    dh = torch.bmm(dys, t.spread.transpose(1, 2)).view(dim, x.size(0), -1, states).permute(2, 1, 0, 3)
    dh[-1, ..., :forward] += dlast
    # Gradients flow in the opposite direction: du_k is the total gradient of the state after block k.
    du = scan(dh[..., :forward], t.decay[:, :forward], None, reverse=True)
    dinitial = torch.addcmul(dh[0, ..., :forward], t.decay[:, :forward], du[0])
    if states > forward:
        du = torch.cat([du, scan(dh[..., forward:], t.decay[:, forward:], None)], -1)
    ddecay = torch.einsum("kbdm,kbdm->dm", du, enter)
    du, enter = (s.permute(2, 1, 0, 3).reshape(dim, -1, states) for s in (du, enter))  # (D, B K, M)
    dwithin, dcollect, dspread = torch.bmm(xt, dys), torch.bmm(xt, du), torch.bmm(enter.transpose(1, 2), dys)
    del xt, enter
    dxs = torch.bmm(du, t.collect.transpose(1, 2)).baddbmm_(dys, t.within.transpose(1, 2))
    del dys, du
    return _channels_last(dxs, x.size(0), x.dtype), dinitial, dwithin, dcollect, dspread, ddecay


class _BlockScan(torch.autograd.Function):
    """`_block_scan` that returns the state before the last block; `given` are the tables, or the arguments of `make`.

    It keeps x, the block states and `given` for backward, where `make` makes the tables again.
    """

    @staticmethod
    def forward(ctx, make, x, initial, *given):
        y, enter = _block_scan(x, (make or _BlockTables)(*given), initial)
        ctx.save_for_backward(x, enter, *given)
        ctx.make = make
        return y, None if initial is None else enter[-1, ..., : initial.size(-1)].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, dlast):
        x, enter, *given = ctx.saved_tensors
        with without_autocast(x):
            if ctx.make is None:
                return None, *_block_scan_backward(dy, dlast, x, _BlockTables(*given), enter)
            with torch.enable_grad():
                given = [t.detach().requires_grad_() for t in given]
                made = ctx.make(*given)
            tables = _BlockTables(*(None if t is None else t.detach() for t in made))
            dx, dinitial, *dtables = _block_scan_backward(dy, dlast, x, tables, enter)
            return None, dx, dinitial, *torch.autograd.grad(made[: len(dtables)], given, dtables)


def _run_blocks(
    x: Tensor,
    size: int,
    initial: Optional[Tensor],
    skip: Tensor,
    c: EMACoefficients,
    backward: Optional[EMACoefficients] = None,
) -> Tuple[Tensor, Optional[Tensor], Optional[Tensor]]:
    """Outputs, the state before the last block, and the table `collect` if it was kept.

    With C = 128, what they are made from has as many numbers as 26,000 tokens, so on a GPU they are made again in
    backward. On the CPU, where they are smaller, they are kept: making them again takes 5% longer with 8,192 tokens,
    and up to a third with fewer.
    """
    make, given = partial(_block_tables, size, initial is None), (skip, *c, *(backward or ()))
    if x.device.type == "cpu" or is_compiling():
        tables = make(*given)
        if is_compiling():
            y, enter = _block_scan(x, tables, initial)
            return y, enter[-1, ..., : initial.size(-1)], tables.collect
        given = (t for t in tables if t is not None)
        return *_BlockScan.apply(None, x, initial, *given), tables.collect
    return *_BlockScan.apply(make, x, initial, *given), None


def _block_size(x: Tensor) -> int:
    return min(x.size(1), BLOCK if x.device.type == "cpu" else BLOCK_GPU)


def ema_scan(
    x: Tensor,
    c: EMACoefficients,
    state: Optional[Tensor] = None,
    skip: Optional[Tensor] = None,
    lengths: Optional[Tensor] = None,
) -> Tuple[Tensor, Tensor]:
    """Causal EMA in blocks: x (B, L, D) -> y (B, L, D) in x's dtype, the state after `lengths` steps of each row."""
    length, size = x.size(1), _block_size(x)
    skip = no_skip(c) if skip is None else skip
    one_block = length == size and state is None and not is_compiling()
    initial = None if one_block else zero_state(x, c) if state is None else state
    y, last, collect = _run_blocks(_pad_to_multiple(x, size), size, initial, skip, c)
    y, rest = y[:, :length], (length - 1) % size + 1  # steps of the last block, which may be incomplete
    if one_block or lengths is not None:
        return y, final_state(x, c, state, lengths)
    if collect is None:
        return y, final_state(x[:, length - rest :], c, last)
    tail = x[:, length - rest :].permute(2, 0, 1).to(last.dtype)  # (D, B, rest)
    collected = torch.bmm(tail, collect[:, size - rest :]).transpose(0, 1)  # (B, D, N)
    return y, torch.addcmul(collected, torch.exp(c.log_decay * rest), last)


def ema_scan_both(x: Tensor, c: EMACoefficients, backward: EMACoefficients, skip: Tensor) -> Tensor:
    size = _block_size(x)
    one_block = x.size(1) == size and not is_compiling()
    initial = None if one_block else zero_state(x, c)
    return _run_blocks(_pad_to_multiple(x, size), size, initial, skip, c, backward)[0][:, : x.size(1)]


# ---------------------------------------------------------------------------------------------- truncated kernels


def _cut_ema(x: Tensor, c: EMACoefficients, taps: int) -> Tensor:
    """The EMA of T taps in blocks: Toeplitz products for the first and last lags, states for those in between.

    Outputs depend on the T inputs within reach and on no others. Cheaper methods do not achieve this: through the
    rounding of an FFT, a large input changes earlier outputs; an EMA minus its delayed copy keeps rounding errors of
    inputs out of reach.
    """
    size = min(x.size(1), taps, _block_size(x))
    xs = _channels_first(_pad_to_multiple(x, size), size, x.dtype).view(x.size(2), x.size(0), -1, size)  # (D, B, K, C)
    kernel = F.pad(ema_kernel(c, taps), (size - 1, 2 * size))
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
        u = torch.matmul(xs, collecting(c, size).unsqueeze(1))  # (D, B, K, N)
        states = _shifted(_sliding_sum(u, torch.exp(c.log_decay * size), whole), 1)
        y = y + torch.matmul(states, spreading(c, size).unsqueeze(1))
    return _channels_last(y, x.size(0), x.dtype)[:, : x.size(1)]


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


def ema_window(
    x: Tensor,
    c: EMACoefficients,
    truncation: int,
    state: Optional[Tensor] = None,
    skip: Optional[Tensor] = None,
    lengths: Optional[Tensor] = None,
) -> Tuple[Tensor, Tensor]:
    """Causal EMA of `truncation` taps; the state (B, D, T - 1) holds the inputs that the taps still reach."""
    length, reach = x.size(1), truncation - 1
    if length == 1:
        state = x.new_zeros(x.size(0), x.size(2), reach) if state is None else state
        y, end = ema_window_step(x[:, 0], window_taps(c, truncation), state, skip)
        return y.unsqueeze(1), end if lengths is None else torch.where(lengths.view(-1, 1, 1) > 0, end, state)
    window = x if state is None else torch.cat([state.transpose(1, 2), x], 1)  # (B, T - 1 + L, D)
    y = _cut_ema(window, c, truncation)[:, window.size(1) - length :]
    if skip is not None:
        y = y + skip * x
    if lengths is not None:
        window = end_aligned(window, lengths + (window.size(1) - length))
    window = F.pad(window, (0, 0, max(0, reach - window.size(1)), 0))
    return y, window[:, window.size(1) - reach :].transpose(1, 2).contiguous()  # a view would keep all of `window`


def window_taps(c: EMACoefficients, truncation: int) -> Tensor:
    """The taps of a truncated EMA for `ema_window_step`, the oldest input's tap first: (D, T)."""
    return ema_kernel(c, truncation).flip(-1)


def ema_window_step(x: Tensor, taps: Tensor, state: Tensor, skip: Optional[Tensor] = None) -> Tuple[Tensor, Tensor]:
    """One token of a truncated EMA: x (B, D), taps (D, T), state (B, D, T - 1) -> y (B, D) in x's dtype, next state.

    `taps` are `window_taps(c, truncation)`, computed once per generation.
    """
    wide = x.to(taps.dtype)
    window = torch.cat([state, wide.unsqueeze(-1)], -1)  # (B, D, T)
    # Any other order of the factors, or a sum of products, takes the CPU four to twelve times as long.
    y = torch.bmm(taps.unsqueeze(1), window.permute(1, 2, 0)).squeeze(1).t()  # (B, D)
    if skip is not None:
        y = torch.addcmul(y, skip, wide)
    return y.to(x.dtype), window[..., 1:]


def _pad_to_multiple(x: Tensor, size: int) -> Tensor:
    rest = -x.size(1) % size
    return F.pad(x, (0, 0, 0, rest)) if rest else x
