"""The damped EMA in blocks of C steps: Toeplitz products inside blocks, N states per channel between blocks."""

from typing import List, NamedTuple, Optional, Tuple, Union

import torch
import torch.nn.functional as F
from torch import Tensor

from mega_fairseq.ops.diagonals import toeplitz_matrix
from mega_fairseq.ops.ema.naive import EMACoefficients, powers
from mega_fairseq.ops.operators import operator
from mega_fairseq.ops.padding import padding_from_lengths

# A larger block has more Toeplitz work, fewer scan steps and states. docs/performance.md has times on the CPU.
BLOCK = 64


def ema_blocks(
    x: Tensor,
    c: EMACoefficients,
    state: Optional[Tensor] = None,
    skip: Optional[Tensor] = None,
    truncation: Optional[int] = None,
    lengths: Optional[Tensor] = None,
) -> Tuple[Tensor, Optional[Tensor]]:
    """`ema` in blocks."""
    padding = None if lengths is None else padding_from_lengths(lengths, x.size(1)).unsqueeze(-1)
    if padding is not None:
        x = x.masked_fill(padding, 0.0)
    y, end = (_windows if truncation else _blocks)(x, c, state, skip, truncation, lengths)
    return (y if padding is None else y.masked_fill(padding, 0.0)).to(x.dtype), end


def _blocks(
    x: Tensor, c: EMACoefficients, state: Optional[Tensor], skip: Optional[Tensor], _: None, lengths: Optional[Tensor]
) -> Tuple[Tensor, Optional[Tensor]]:
    length = x.size(1)
    size = min(length, BLOCK)
    one_block = length == size and state is None  # such as most sentences
    tables = _block_tables(c, skip, size)
    y, enter = block_scan(
        _pad_to_multiple(x, size), state, *((tables.within, None, None, None) if one_block else tables)
    )
    y = y[:, :length]
    if c.expand.size(0) == 2:
        return y, None
    if lengths is None:
        rest = (length - 1) % size + 1  # steps of the last block
        return y, _after(x[:, length - rest :], rest, None if one_block else enter[-1], tables.collect, c)
    block = (lengths - 1).clamp_min(0) // size  # each row's last one
    rest = lengths - block * size
    tail = _last_steps(x, size, lengths).masked_fill(~padding_from_lengths(size - rest, size).unsqueeze(-1), 0.0)
    before = None if one_block else enter[block, torch.arange(x.size(0), device=x.device)]
    return y, _after(tail, rest.view(-1, 1, 1), before, tables.collect, c)


def _after(
    x: Tensor, steps: Union[int, Tensor], before: Optional[Tensor], collect: Tensor, c: EMACoefficients
) -> Tensor:
    """The state after `steps` steps x (B, up to C, D), at the end of it, from the state before them: (B, D, N)."""
    size = collect.size(1)
    xs = x.permute(2, 0, 1).to(collect.dtype)  # (D, B, steps)
    after = torch.bmm(xs, collect[:, size - x.size(1) :]).transpose(0, 1)
    return after if before is None else torch.addcmul(after, torch.exp(c.log_decay * steps), before)


def _last_steps(x: Tensor, count: int, lengths: Optional[Tensor]) -> Tensor:
    """The last `count` steps of each row, zeros first if it has fewer: (B, L, D) -> (B, count, D)."""
    if lengths is None:
        return F.pad(x, (0, 0, max(0, count - x.size(1)), 0))[:, -count:] if count else x[:, :0]
    at = lengths.unsqueeze(1) + torch.arange(-count, 0, device=x.device)  # (B, count)
    steps = x.gather(1, at.clamp_min(0).unsqueeze(-1).expand(-1, -1, x.size(2)))
    return steps.masked_fill((at < 0).unsqueeze(-1), 0.0)


def final_state(x: Tensor, c: EMACoefficients) -> Tensor:
    """The state of a causal EMA after x (B, L, D), from a state of zeros and without its outputs: (B, D, N)."""
    size = min(x.size(1), BLOCK)
    xs = x.to(c.expand.dtype)
    xs = F.pad(xs, (0, 0, -x.size(1) % size, 0))  # leading zeros do not change a state of zeros
    xs = xs.transpose(1, 2).unflatten(2, (-1, size)).transpose(0, 1).flatten(1, 2)  # (D, B K, C)
    blocks = torch.bmm(xs, _block_tables(c, None, size).collect).unflatten(1, (x.size(0), -1))  # (D, B, K, N)
    later = powers(c.log_decay[0] * size, 0, blocks.size(2)).flip(-1).transpose(1, 2)  # (D, K, N)
    return (blocks * later.unsqueeze(1)).sum(2).transpose(0, 1)


# ---------------------------------------------------------------------------------------------- the scan over blocks


class BlockTables(NamedTuple):
    """The recurrence over C steps at once, for R directions: M = R N states per channel."""

    within: Tensor  # (D, C, C): from an input to the outputs of its block
    collect: Tensor  # (D, C, M): from an input to the state after its block
    spread: Tensor  # (D, M, C): from the state before a block to its outputs
    decay: Tensor  # (R, D, N): phi^C


def _block_tables(c: EMACoefficients, skip: Optional[Tensor], size: int) -> BlockTables:
    reach = powers(c.log_decay, 0, size)  # (R, D, N, C): phi^t
    entering = c.expand.unsqueeze(-1) * reach  # what is left of an input after t steps
    taps = torch.matmul(c.project.unsqueeze(-2), entering).squeeze(-2)  # (R, D, C)
    present, past = taps[..., 0].sum(0), taps[0, :, 1:]
    if skip is not None:
        present = present + skip
    future = taps[1, :, 1:].flip(-1) if taps.size(0) == 2 else torch.zeros_like(past)
    # (D, 2C - 1): the weights of the inputs from C - 1 steps after an output to C - 1 steps before it
    within = toeplitz_matrix(torch.cat([future, present.unsqueeze(-1), past], -1), size, size)
    leaving = (c.project * torch.exp(c.log_decay)).unsqueeze(-1) * reach
    collect, spread = [entering[0].flip(-1), *entering[1:]], [leaving[0], *leaving[1:].flip(-1)]
    return BlockTables(within, _joined(collect).transpose(1, 2), _joined(spread), torch.exp(c.log_decay * size))


def _joined(tables: List[Tensor]) -> Tensor:
    return torch.cat(tables, 1) if len(tables) > 1 else tables[0]


def _forward(
    x: Tensor,
    initial: Optional[Tensor],
    within: Tensor,
    collect: Optional[Tensor],
    spread: Optional[Tensor],
    decay: Optional[Tensor],
) -> Tuple[Tensor, Tensor]:
    size, dtype = within.size(1), within.dtype
    xs = _channels_first(x, size, dtype)
    if collect is None:
        return _channels_last(torch.bmm(xs, within), x), within.new_empty(0)
    enter = _scan(_blocks_first(torch.bmm(xs, collect), x.size(0)), decay, initial, back=False)
    return _channels_last(torch.baddbmm(torch.bmm(_blocks_last(enter), spread), xs, within), x), enter


def _fake(x, initial, within, collect, spread, decay):
    shape = (0,) if collect is None else (x.size(1) // within.size(1), x.size(0), x.size(2), collect.size(2))
    return torch.empty_like(x), within.new_empty(shape)


def _backward(grads, saved, x, initial, within, collect, spread, decay) -> List[Tensor]:
    (dy, denter), (enter,), (size, dtype) = grads, saved, (within.size(1), within.dtype)
    dy = torch.zeros_like(x) if dy is None else dy
    dys, xt = _channels_first(dy, size, dtype), _channels_first(x, size, dtype).transpose(1, 2)  # xt (D, C, B K)
    if collect is None:
        return [_channels_last(torch.bmm(dys, within.transpose(1, 2)), x), torch.bmm(xt, dys)]
    dh = _blocks_first(torch.bmm(dys, spread.transpose(1, 2)), x.size(0))
    dh = dh if denter is None else dh + denter
    # Gradients flow in the opposite direction: du_k is the total gradient of the state after block k.
    du = _scan(dh, decay, None, back=True)
    ndim = decay.size(-1)
    dinitial = [] if initial is None else [torch.addcmul(dh[0, ..., :ndim], decay[0], du[0, ..., :ndim])]
    ddecay = torch.einsum("kbdm,kbdm->dm", du, enter).unflatten(1, (-1, ndim)).transpose(0, 1)
    dus, enters = _blocks_last(du), _blocks_last(enter)
    dtables = [torch.bmm(xt, dys), torch.bmm(xt, dus), torch.bmm(enters.transpose(1, 2), dys), ddecay]
    del xt, enters
    dxs = torch.bmm(dus, collect.transpose(1, 2)).baddbmm_(dys, within.transpose(1, 2))
    return [_channels_last(dxs, x), *dinitial, *dtables]


# x (B, K C, D) -> y, and the states before the blocks (K, B, D, M); without `collect`, for one block, (0,). Channels
# come first inside, so that every product is a batched matrix product over channels. With autograd's own gradient, the
# EMA takes 1.0 (8,192 tokens) to 1.4 times the time (a sentence): it would transpose gradients as views, which matrix
# products then read slowly.
block_scan = operator(
    "block_scan",
    "Tensor x, Tensor? initial, Tensor within, Tensor? collect, Tensor? spread, Tensor? decay",
    "(Tensor, Tensor)",
    _forward,
    _fake,
    _backward,
)


def _scan(u: Tensor, decay: Tensor, initial: Optional[Tensor], back: bool) -> Tensor:
    """h_{k+1} = decay h_k + u_k: u (K, B, D, M) -> the state before each k; the second direction from the end.

    `back` exchanges the directions.
    """
    states = torch.empty_like(u, memory_format=torch.contiguous_format)
    run = _one_after_the_other if u.device.type == "cpu" else _by_doubling
    for direction, (inputs, out) in enumerate(zip(*(t.split(decay.size(-1), -1) for t in (u, states)))):
        first = torch.zeros_like(inputs[0]) if initial is None or direction else initial
        run(inputs, decay[direction], first, out, reverse=back != bool(direction))
    return states


def _one_after_the_other(u: Tensor, decay: Tensor, h: Tensor, out: Tensor, reverse: bool) -> None:
    for k in range(u.size(0) - 1, -1, -1) if reverse else range(u.size(0)):
        out[k] = h
        h = torch.addcmul(u[k], decay, h)


def _by_doubling(u: Tensor, decay: Tensor, h: Tensor, out: Tensor, reverse: bool) -> None:
    """In log2 K steps over all of u: more work, but few launches."""
    h = torch.cat([h.unsqueeze(0), u.flip(0)[:-1] if reverse else u[:-1]])
    stride = 1
    while stride < h.size(0):
        h = torch.cat([h[:stride], torch.addcmul(h[stride:], decay, h[:-stride])])
        decay, stride = decay * decay, stride * 2
    out.copy_(h.flip(0) if reverse else h)


def _channels_first(x: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """(B, K C, D) -> (D, B K, C). A transposed 2-D copy is four times as fast as a permuted 3-D one."""
    return x.reshape(-1, x.size(-1)).to(dtype).t().contiguous().view(x.size(-1), -1, size)


def _channels_last(xs: Tensor, like: Tensor) -> Tensor:
    """(D, B K, C) -> (B, K C, D) in the dtype of `like`."""
    return xs.view(xs.size(0), -1).to(like.dtype).t().contiguous().view(like.shape)


def _blocks_first(h: Tensor, batch: int) -> Tensor:
    """(D, B K, M) -> (K, B, D, M)."""
    return h.view(h.size(0), batch, -1, h.size(-1)).permute(2, 1, 0, 3)


def _blocks_last(h: Tensor) -> Tensor:
    """(K, B, D, M) -> (D, B K, M)."""
    return h.permute(2, 1, 0, 3).reshape(h.size(2), -1, h.size(3))


def _pad_to_multiple(x: Tensor, size: int) -> Tensor:
    rest = -x.size(1) % size
    return F.pad(x, (0, 0, 0, rest)) if rest else x


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


def _windows(
    x: Tensor,
    c: EMACoefficients,
    state: Optional[Tensor],
    skip: Optional[Tensor],
    truncation: int,
    lengths: Optional[Tensor],
) -> Tuple[Tensor, Optional[Tensor]]:
    """The state (B, D, T - 1) holds the inputs that the taps still reach."""
    length = x.size(1)
    x = x.to(c.expand.dtype)
    window = x if state is None else torch.cat([state.transpose(1, 2), x], 1)  # (B, T - 1 + L, D)
    y = _cut_ema(window, c, 0, truncation)[:, window.size(1) - length :]
    end = None
    if c.expand.size(0) == 2:
        y = y + _cut_ema(x.flip(1), c, 1, truncation).flip(1)
    else:
        lengths = None if lengths is None else lengths + (window.size(1) - length)
        end = _last_steps(window, truncation - 1, lengths).transpose(1, 2).contiguous()  # a view would keep `window`
    return y if skip is None else y + skip * x, end


def _cut_ema(x: Tensor, c: EMACoefficients, direction: int, taps: int) -> Tensor:
    """The EMA of T taps in blocks: Toeplitz products for the first and last lags, states for those in between.

    Outputs depend on the T inputs within reach and on no others. Cheaper methods do not achieve this: through the
    rounding of an FFT, a large input changes earlier outputs; an EMA minus its delayed copy keeps rounding errors of
    inputs out of reach.
    """
    c = EMACoefficients(*(t[direction : direction + 1] for t in c))
    size = min(x.size(1), taps, BLOCK)
    padded = _pad_to_multiple(x, size)
    xs = _channels_first(padded, size, x.dtype).view(x.size(2), x.size(0), -1, size)  # (D, B, K, C)
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
    return _channels_last(y, padded)[:, : x.size(1)]


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
