"""Multi-dimensional damped exponential moving average (paper, section 3.1 and appendix B, eq. 3-5 and 22-26).

For each of D channels, with an N-dimensional hidden state (x_t a scalar of that channel):

    h_t = phi . h_{t-1} + (alpha . beta) x_t          phi = 1 - alpha . delta       (eq. 4, 22)
    y_t = eta^T h_t + omega x_t                       omega: skip weight, not in the paper   (eq. 5)

which is also a convolution with the kernel K_t = sum_n eta_n alpha_n beta_n phi_n^t (eq. 25).

Five forms of the same function, all float32 inside (float64 for float64 inputs):

    ema_naive   one step after the other as written above; the truth that the others are tested against
    ema_step    one token: what decoding runs
    ema_scan    blocks of C: a C x C Toeplitz product inside a block, only the N-dimensional state between blocks
    ema_fft     the convolution theorem, with a kernel built in two levels of powers (`geometric_sum`)
    ema_window  a kernel cut to its first T taps (truncation), over the window of the last T - 1 inputs

`ema` and `bidirectional_ema` choose. Sequences are batch-first (B, L, D), right-padded, with `lengths` saying
where each one ends. A state is (B, D, N): the hidden state; for a truncated EMA (B, D, T - 1): the last inputs.
"""

import math
from typing import NamedTuple, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mega_fairseq.ops.padding import padding_from_lengths
from mega_fairseq.ops.precision import at_least_float32, is_compiling, without_autocast

# Crossovers, measured by `python benchmarks/layer.py --forms` (docs/performance.md, "Which form when").
BLOCK = 64  # steps in a block of the scan on the CPU: Toeplitz work grows with it, scan steps and states shrink
BLOCK_GPU = 128  # fewer, larger products where each launch costs: chosen by launch count, not yet measured on a GPU
INNER = 64  # C of the two-level powers: near the square root of the lengths that matter


class EMACoefficients(NamedTuple):
    """What the recurrence needs, each (D, N) in float32 or float64."""

    log_decay: Tensor  # log phi, finite and <= 0
    expand: Tensor  # alpha . beta: what an input adds to the state
    project: Tensor  # eta: how the state is read


def ema_coefficients(alpha: Tensor, delta: Tensor, beta: Tensor, eta: Tensor) -> EMACoefficients:
    """From the logits of alpha and delta and from beta and eta, all (..., N), to the recurrence's coefficients.

    log phi is taken from whichever side keeps its digits: log1p(-alpha delta) for slow decays (phi near 1), and
    log(1 - alpha + alpha (1 - delta)), a sum of positive terms, for fast ones. So phi neither rounds to 1 in slow
    channels nor to 0 at large logits, where a log would be infinite. eta is scaled by sqrt(1/N).
    """
    alpha, delta, beta, eta = (t.to(at_least_float32(t.dtype)) for t in (alpha, delta, beta, eta))
    weight, damping = torch.sigmoid(alpha), torch.sigmoid(delta)
    product = weight * damping
    complement = torch.sigmoid(-alpha) + weight * torch.sigmoid(-delta)
    slow = product < 0.5
    # Each branch sees a harmless constant where the other one is taken, so that its gradient is 0 there, not NaN.
    log_decay = torch.where(
        slow,
        torch.log1p(-torch.where(slow, product, 0.25)),
        torch.log(torch.where(slow, 0.75, complement).clamp_min(torch.finfo(alpha.dtype).tiny)),
    )
    return EMACoefficients(log_decay, weight * beta, eta * math.sqrt(1.0 / eta.size(-1)))


def powers(log_decay: Tensor, first: int, count: int) -> Tensor:
    """phi^t for t = first .. first + count - 1: (D, N) -> (D, N, count)."""
    t = torch.arange(first, first + count, device=log_decay.device, dtype=log_decay.dtype)
    return torch.exp(log_decay.unsqueeze(-1) * t)


def geometric_sum(weight: Tensor, log_decay: Tensor, length: int) -> Tensor:
    """sum_n weight_n phi_n^t for t < length: weight (D, R, N), log_decay (D, N) -> (D, R, length).

    phi^(aC+b) = (phi^C)^a phi^b: two short tables of powers, length / C + C entries, and one small batched matrix
    product in place of a D x N x length tensor and as many calls of exp.
    """
    inner = min(length, INNER)
    outer = -(-length // inner)
    coarse = powers(log_decay * inner, 0, outer).transpose(1, 2)  # (D, A, N)
    rows = (weight.unsqueeze(2) * coarse.unsqueeze(1)).flatten(1, 2)  # (D, R A, N)
    taps = torch.bmm(rows, powers(log_decay, 0, inner))  # (D, R A, C)
    return taps.view(weight.size(0), weight.size(1), outer * inner)[..., :length]


def ema_kernel(c: EMACoefficients, length: int) -> Tensor:
    """The first `length` taps of the convolution kernel (eq. 25): (D, length)."""
    return geometric_sum((c.expand * c.project).unsqueeze(1), c.log_decay, length).squeeze(1)


# ---------------------------------------------------------------------------------------------- one step at a time


def ema_step(x: Tensor, c: EMACoefficients, state: Tensor) -> Tuple[Tensor, Tensor]:
    """One token: x (B, D), state (B, D, N) -> y (B, D), next state."""
    state = torch.addcmul(c.expand * x.unsqueeze(-1), torch.exp(c.log_decay), state)
    return (state * c.project).sum(-1), state


def ema_naive(x: Tensor, c: EMACoefficients, state: Optional[Tensor] = None) -> Tuple[Tensor, Tensor]:
    """The definition, step after step: x (B, L, D) -> y (B, L, D), final state (B, D, N)."""
    h = _zero_state(x, c) if state is None else state
    ys = []
    for t in range(x.size(1)):
        y, h = ema_step(x[:, t], c, h)
        ys.append(y)
    return torch.stack(ys, 1), h


# ---------------------------------------------------------------------------------------------- blocks and a scan


class _BlockTables(NamedTuple):
    """The recurrence over C steps at once; M = N states a channel, or 2N when both directions run."""

    within: Tensor  # (D, C, C): from an input to the outputs of its own block
    collect: Tensor  # (D, C, M): from an input to the state that leaves its block
    spread: Tensor  # (D, M, C): from the state that enters a block to its outputs
    decay: Tensor  # (D, M): phi^C


def _toeplitz(taps: Tensor, size: int) -> Tensor:
    """(D, 2C - 1) taps for lags -(C-1) .. C-1  ->  (D, C, C) with [c, c'] = tap of lag c' - c."""
    return taps.unfold(-1, size, 1).flip(1)


def _block_tables(
    c: EMACoefficients, skip: Tensor, size: int, backward: Optional[EMACoefficients] = None
) -> _BlockTables:
    taps = ema_kernel(c, size)  # (D, C)
    present = taps[:, :1] + skip.unsqueeze(-1)
    collect = (c.expand.unsqueeze(-1) * powers(c.log_decay, 0, size)).flip(-1).transpose(1, 2)  # (D, C, N)
    spread = c.project.unsqueeze(-1) * powers(c.log_decay, 1, size)  # (D, N, C)
    decay = torch.exp(c.log_decay * size)
    if backward is None:
        past = torch.zeros_like(taps[:, 1:])
        return _BlockTables(_toeplitz(torch.cat([past, present, taps[:, 1:]], -1), size), collect, spread, decay)
    back = ema_kernel(backward, size)
    both = torch.cat([back[:, 1:].flip(-1), present + back[:, :1], taps[:, 1:]], -1)
    collect_back = (backward.expand.unsqueeze(-1) * powers(backward.log_decay, 0, size)).transpose(1, 2)
    spread_back = (backward.project.unsqueeze(-1) * powers(backward.log_decay, 1, size)).flip(-1)
    return _BlockTables(
        _toeplitz(both, size),
        torch.cat([collect, collect_back], 2),
        torch.cat([spread, spread_back], 1),
        torch.cat([decay, torch.exp(backward.log_decay * size)], -1),
    )


def _scan(u: Tensor, decay: Tensor, first: Optional[Tensor], reverse: bool = False) -> Tensor:
    """h_{k+1} = decay h_k + u_k along dim 0: u (K, B, D, N) -> the state before each k (after it, if reverse)."""
    h = torch.zeros_like(u[0]) if first is None else first
    out = torch.empty_like(u)
    for k in range(u.size(0) - 1, -1, -1) if reverse else range(u.size(0)):
        out[k] = h
        h = torch.addcmul(u[k], decay, h)
    return out


def _scan_by_doubling(u: Tensor, decay: Tensor, first: Optional[Tensor], reverse: bool = False) -> Tensor:
    """`_scan` in log2 K steps over all of u: more work, but few launches and nothing in place."""
    if reverse:
        return _scan_by_doubling(u.flip(0), decay, first).flip(0)
    h = torch.cat([(torch.zeros_like(u[0]) if first is None else first).unsqueeze(0), u[:-1]])
    stride = 1
    while stride < h.size(0):
        h = torch.cat([h[:stride], torch.addcmul(h[stride:], decay, h[:-stride])])
        decay, stride = decay * decay, stride * 2
    return h


def _enter_blocks(xs: Tensor, t: _BlockTables, initial: Tensor, blocks: int) -> Tensor:
    """The states that enter each block: xs (D, B K, C) -> (K, B, D, M), forward ones first."""
    batch, dim, forward = initial.shape
    scan = _scan if xs.device.type == "cpu" and not is_compiling() else _scan_by_doubling
    u = torch.bmm(xs, t.collect).view(dim, batch, blocks, -1).permute(2, 1, 0, 3)  # (K, B, D, M)
    ahead = scan(u[..., :forward], t.decay[:, :forward], initial)
    if u.size(-1) == forward:
        return ahead
    return torch.cat([ahead, scan(u[..., forward:], t.decay[:, forward:], None, reverse=True)], -1)


def _channels_first(x: Tensor, size: int) -> Tensor:
    """(B, K C, D) -> (D, B K, C). As a transposed 2-D copy, which torch does four times as fast as a permuted one."""
    return x.reshape(-1, x.size(-1)).t().contiguous().view(x.size(-1), -1, size)


def _channels_last(xs: Tensor, batch: int) -> Tensor:
    """(D, B K, C) -> (B, K C, D)."""
    return xs.view(xs.size(0), -1).t().contiguous().view(batch, -1, xs.size(0))


def _block_scan(x: Tensor, t: _BlockTables, initial: Tensor) -> Tuple[Tensor, Tensor]:
    """(x, tables, initial state) -> y and the states that enter the blocks, (K, B, D, M); L is a multiple of C.

    Channels lead inside, so that every product is a batched matrix product over channels.
    """
    size = t.collect.size(1)
    xs = _channels_first(x, size)
    enter = _enter_blocks(xs, t, initial, x.size(1) // size)
    h = enter.permute(2, 1, 0, 3).reshape(x.size(2), xs.size(1), -1)  # (D, B K, M)
    return _channels_last(torch.baddbmm(torch.bmm(h, t.spread), xs, t.within), x.size(0)), enter


class _BlockScan(torch.autograd.Function):
    """`_block_scan`, giving the state that enters the last block; x and the block states are all that it saves."""

    @staticmethod
    def forward(ctx, x, initial, *tables):
        y, enter = _block_scan(x, _BlockTables(*tables), initial)
        ctx.save_for_backward(x, enter, *tables)
        ctx.forward_states = initial.size(-1)
        return y, enter[-1, ..., : initial.size(-1)].clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy, dlast):
        x, enter, *tables = ctx.saved_tensors
        t, forward = _BlockTables(*tables), ctx.forward_states
        dim, size, states = t.collect.shape
        scan = _scan if x.device.type == "cpu" else _scan_by_doubling
        with without_autocast(x):
            dys = _channels_first(dy, size)
            dh = torch.bmm(dys, t.spread.transpose(1, 2)).view(dim, x.size(0), -1, states).permute(2, 1, 0, 3)
            dh[-1, ..., :forward] += dlast
            # Gradients travel against the states: du_k is the whole gradient of the state that u_k leads to.
            du = scan(dh[..., :forward], t.decay[:, :forward], None, reverse=True)
            dinitial = torch.addcmul(dh[0, ..., :forward], t.decay[:, :forward], du[0])
            if states > forward:
                du = torch.cat([du, scan(dh[..., forward:], t.decay[:, forward:], None)], -1)
            ddecay = torch.einsum("kbdm,kbdm->dm", du, enter)
            xt = _channels_first(x, size).transpose(1, 2)  # (D, C, B K)
            du, enter = (s.permute(2, 1, 0, 3).reshape(dim, -1, states) for s in (du, enter))  # (D, B K, M)
            dwithin, dcollect, dspread = (
                torch.bmm(xt, dys),
                torch.bmm(xt, du),
                torch.bmm(enter.transpose(1, 2), dys),
            )
            del xt, enter
            dxs = torch.bmm(du, t.collect.transpose(1, 2)).baddbmm_(dys, t.within.transpose(1, 2))
            del dys, du
            return _channels_last(dxs, x.size(0)), dinitial, dwithin, dcollect, dspread, ddecay


def _run_blocks(x: Tensor, t: _BlockTables, initial: Tensor) -> Tuple[Tensor, Tensor]:
    if is_compiling():
        y, enter = _block_scan(x, t, initial)
        return y, enter[-1, ..., : initial.size(-1)]
    return _BlockScan.apply(x, initial, *t)


def _block_size(x: Tensor) -> int:
    return min(x.size(1), BLOCK if x.device.type == "cpu" else BLOCK_GPU)


def ema_scan(
    x: Tensor, c: EMACoefficients, state: Optional[Tensor] = None, skip: Optional[Tensor] = None
) -> Tuple[Tensor, Tensor]:
    """Causal EMA in blocks: x (B, L, D) -> y (B, L, D), final state (B, D, N)."""
    length, size = x.size(1), _block_size(x)
    tables = _block_tables(c, _no_skip(c) if skip is None else skip, size)
    y, last = _run_blocks(_pad_to_multiple(x, size), tables, _zero_state(x, c) if state is None else state)
    rest = (length - 1) % size + 1  # steps of the last block, which may be a partial one
    tail = x[:, length - rest :].permute(2, 0, 1)  # (D, B, rest)
    collected = torch.bmm(tail, tables.collect[:, size - rest :]).transpose(0, 1)  # (B, D, N)
    return y[:, :length], torch.addcmul(collected, torch.exp(c.log_decay * rest), last)


def _ema_scan_both(x: Tensor, c: EMACoefficients, backward: EMACoefficients, skip: Tensor) -> Tensor:
    size = _block_size(x)
    tables = _block_tables(c, skip, size, backward)
    y, _ = _run_blocks(_pad_to_multiple(x, size), tables, _zero_state(x, c))
    return y[:, : x.size(1)]


# ---------------------------------------------------------------------------------------------- convolution


def _fft_length(n: int) -> int:
    """The smallest 2^a 3^b 5^c >= n: lengths that an FFT is fast at."""
    best = _doubled(1, n)
    five = 1
    while five < best:
        three = five
        while three < best:
            best = min(best, _doubled(three, n))
            three *= 3
        five *= 5
    return best


def _doubled(start: int, n: int) -> int:
    while start < n:
        start *= 2
    return start


def _convolve(x: Tensor, taps: Tensor, past: int, future: int) -> Tensor:
    """x (B, L, D) with taps (D, past + 1 + future) for lags -future .. past -> (B, L, D), by FFT."""
    length = x.size(1)
    n = _fft_length(length + max(past, future))
    kernel = F.pad(taps, (0, n - taps.size(-1))).roll(-future, -1) if future else taps
    spectrum = torch.fft.rfft(x.transpose(1, 2), n) * torch.fft.rfft(kernel, n)
    return torch.fft.irfft(spectrum, n)[..., :length].transpose(1, 2)


def ema_fft(
    x: Tensor, c: EMACoefficients, state: Optional[Tensor] = None, skip: Optional[Tensor] = None
) -> Tuple[Tensor, Tensor]:
    """Causal EMA by the convolution theorem: x (B, L, D) -> y (B, L, D), final state (B, D, N)."""
    length = x.size(1)
    y = _convolve(x, ema_kernel(c, length), length - 1, 0)
    if skip is not None:
        y = y + skip * x
    if state is not None:
        first = state.transpose(0, 1) * (c.project * torch.exp(c.log_decay)).unsqueeze(1)  # (D, B, N)
        y = y + geometric_sum(first, c.log_decay, length).permute(1, 2, 0)
    return y, final_state(x, c, state)


def _ema_fft_both(
    x: Tensor, c: EMACoefficients, backward: EMACoefficients, skip: Tensor, truncation: Optional[int]
) -> Tensor:
    taps = x.size(1) if truncation is None else min(truncation, x.size(1))
    ahead, back = ema_kernel(c, taps), ema_kernel(backward, taps)
    present = ahead[:, :1] + back[:, :1] + skip.unsqueeze(-1)
    return _convolve(x, torch.cat([back[:, 1:].flip(-1), present, ahead[:, 1:]], -1), taps - 1, taps - 1)


def ema_window(
    x: Tensor,
    c: EMACoefficients,
    truncation: int,
    state: Optional[Tensor] = None,
    skip: Optional[Tensor] = None,
    lengths: Optional[Tensor] = None,
) -> Tuple[Tensor, Tensor]:
    """Causal EMA of `truncation` taps; the state (B, D, T - 1) holds the inputs that the taps still reach.

    The taps beyond T are phi^T times the whole kernel, so a delayed EMA takes them off again. (An FFT would be as
    fast, but its rounding lets a large input touch the outputs before it.)
    """
    length, reach = x.size(1), truncation - 1
    window = x if state is None else torch.cat([state.transpose(1, 2), x], 1)  # (B, T - 1 + L, D)
    before = window.size(1) - length
    if length == 1:
        y = torch.einsum("btd,dt->bd", window, ema_kernel(c, window.size(1)).flip(-1)).unsqueeze(1)
    else:
        y = ema_scan(window, c)[0][:, before:]
        late = window.size(1) - truncation  # inputs that some output has left behind
        if late > 0:
            beyond = c._replace(project=c.project * torch.exp(c.log_decay * truncation))
            y = y - F.pad(ema_scan(window[:, :late], beyond)[0], (0, 0, truncation - before, 0))
    if skip is not None:
        y = y + skip * x
    if lengths is not None:
        window = _end_aligned(window, lengths + (window.size(1) - length))
    window = F.pad(window, (0, 0, max(0, reach - window.size(1)), 0))
    return y, window[:, window.size(1) - reach :].transpose(1, 2)


# ---------------------------------------------------------------------------------------------- states and padding


def _zero_state(x: Tensor, c: EMACoefficients) -> Tensor:
    return x.new_zeros(x.size(0), *c.expand.shape)


def _no_skip(c: EMACoefficients) -> Tensor:
    return c.expand.new_zeros(c.expand.size(0))


def _pad_to_multiple(x: Tensor, size: int) -> Tensor:
    rest = -x.size(1) % size
    return F.pad(x, (0, 0, 0, rest)) if rest else x


def final_state(
    x: Tensor, c: EMACoefficients, state: Optional[Tensor] = None, lengths: Optional[Tensor] = None
) -> Tensor:
    """The state after each row's last token, without its outputs: the two-level identity of `geometric_sum` again."""
    batch, length, dim = x.shape
    inner = min(length, INNER)
    outer = -(-length // inner)
    if lengths is not None:
        x = _end_aligned(x, lengths)
    x = F.pad(x, (0, 0, outer * inner - length, 0))  # zeros before a zero state change nothing
    blocks = x.reshape(-1, dim).t().reshape(dim, batch * outer, inner)  # (D, B A, C)
    collect = (c.expand.unsqueeze(-1) * powers(c.log_decay, 0, inner)).flip(-1).transpose(1, 2)  # (D, C, N)
    collected = torch.bmm(blocks, collect).view(dim, batch, outer, -1)  # (D, B, A, N)
    reach = powers(c.log_decay * inner, 0, outer).flip(-1).transpose(1, 2)  # (D, A, N)
    end = (collected * reach.unsqueeze(1)).sum(2).transpose(0, 1)  # (B, D, N)
    if state is None:
        return end
    steps = length if lengths is None else lengths.to(x.dtype).view(-1, 1, 1)
    return torch.addcmul(end, torch.exp(c.log_decay * steps), state)


def _end_aligned(x: Tensor, lengths: Tensor) -> Tensor:
    """Rolls each row so that its `lengths` leading entries come last: (B, L, ...) -> (B, L, ...)."""
    length = x.size(1)
    at = torch.arange(length, device=x.device) + lengths.unsqueeze(1)  # (B, L)
    return x.gather(1, (at % length).view(*at.shape, *[1] * (x.dim() - 2)).expand_as(x))


# ---------------------------------------------------------------------------------------------- the entries


def ema(
    x: Tensor,
    c: EMACoefficients,
    state: Optional[Tensor] = None,
    skip: Optional[Tensor] = None,
    truncation: Optional[int] = None,
    lengths: Optional[Tensor] = None,
) -> Tuple[Tensor, Tensor]:
    """Causal EMA in the form that is fastest here: x (B, L, D) -> y (B, L, D) in x's dtype, final state.

    `skip` (D) is omega. `lengths` (B,) marks right padding: padded outputs are zero and padded steps do not age the
    state, so a row leaves the same state alone and in company. `truncation` None or 0 means none.
    """
    dtype = x.dtype
    with without_autocast(x):
        padding = None if lengths is None else padding_from_lengths(lengths, x.size(1)).unsqueeze(-1)
        x = x.to(c.log_decay.dtype)
        if padding is not None:
            x = x.masked_fill(padding, 0.0)
        if truncation:
            y, end = ema_window(x, c, truncation, state, skip, lengths)
        elif x.size(1) == 1:
            y, end = ema_step(x[:, 0], c, _zero_state(x, c) if state is None else state)
            y = (y if skip is None else torch.addcmul(y, skip, x[:, 0])).unsqueeze(1)
        else:
            y, end = ema_scan(x, c, state, skip)
        if padding is not None:
            y = y.masked_fill(padding, 0.0)
            if not truncation:
                end = final_state(x, c, state, lengths)
    return y.to(dtype), end


def bidirectional_ema(
    x: Tensor,
    c: EMACoefficients,
    backward: EMACoefficients,
    skip: Optional[Tensor] = None,
    truncation: Optional[int] = None,
    lengths: Optional[Tensor] = None,
) -> Tensor:
    """Forward plus backward EMA, lag 0 counted by both: x (B, L, D) -> (B, L, D), in x's dtype."""
    dtype = x.dtype
    with without_autocast(x):
        x = x.to(c.log_decay.dtype)
        padding = None if lengths is None else padding_from_lengths(lengths, x.size(1)).unsqueeze(-1)
        if padding is not None:
            x = x.masked_fill(padding, 0.0)
        skip = _no_skip(c) if skip is None else skip
        y = _ema_fft_both(x, c, backward, skip, truncation) if truncation else _ema_scan_both(x, c, backward, skip)
        if padding is not None:
            y = y.masked_fill(padding, 0.0)
    return y.to(dtype)
