"""Linear recurrences in blocks of C steps: Toeplitz products inside blocks, M numbers per channel between blocks.

For each of D channels with N states, h_t = q h_{t-1} + p x_t, and the outputs y_t are a linear function of h_t and x_t.
States and decays q are real (`ops/ema`), in one or two directions, or complex (`ops/cema`): then states are pairs of
reals everywhere but in the scan from block to block. The coefficients `c` of a recurrence have two methods:

    c.block_tables(size, skip)   its tables for `size` steps at once; outputs have `skip` times their input added
    c.decayed(state, steps)      what is left of a state (..., D, N), or (..., D, N, 2) for pairs, after so many steps
"""

from typing import Any, List, NamedTuple, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mega_fairseq.ops.backend import on_cpu
from mega_fairseq.ops.operators import operator
from mega_fairseq.ops.padding import padding_from_lengths, zeros_at_pads

# A larger block has more Toeplitz work, fewer scan steps and states. docs/performance.md has times on the CPU.
BLOCK = 64


class BlockTables(NamedTuple):
    """The recurrence over C steps at once: M = R N real states per channel for R directions, or 2 N for pairs."""

    within: Tensor  # (D, C, C): from an input to the outputs of its block
    collect: Tensor  # (D, C, M): from an input to the state after its block
    spread: Tensor  # (D, M, C): from the state before a block to its outputs
    decay: Tensor  # (R, D, N): q^C; (1, D, N, 2) for pairs

    @property
    def bidirectional(self) -> bool:
        return self.decay.size(0) == 2

    def states(self, h: Tensor) -> Tensor:
        """(..., D, M) of one direction -> (..., D, N), or (..., D, N, 2) for pairs."""
        return h.unflatten(-1, self.decay.shape[2:])


def in_blocks(
    x: Tensor,
    c: Any,
    state: Optional[Tensor] = None,
    skip: Optional[Tensor] = None,
    lengths: Optional[Tensor] = None,
) -> Tuple[Tensor, Optional[Tensor]]:
    """`ema` or `cema`, as `c` are coefficients of one or the other; no truncation."""
    length, size = x.size(1), min(x.size(1), BLOCK)
    one_block = length == size and state is None  # such as most sentences
    xs, tables = zeros_at_pads(x, lengths), c.block_tables(size, skip)
    start = None if state is None else state.flatten(2)
    used = (tables.within, None, None, None) if one_block else tables
    y, enter = block_scan(pad_to_multiple(xs, size), start, *used)
    y = zeros_at_pads(y[:, :length], lengths).to(x.dtype)
    if tables.bidirectional:
        return y, None
    if lengths is None:
        steps = (length - 1) % size + 1  # of the last block
        tail, before = xs[:, length - steps :], None if one_block else enter[-1]
    else:
        block = (lengths - 1).clamp_min(0) // size  # each row's last one
        steps = lengths - block * size
        tail = last_steps(xs, size, lengths).masked_fill(~padding_from_lengths(size - steps, size).unsqueeze(-1), 0.0)
        before = None if one_block else enter[block, torch.arange(x.size(0), device=x.device)]
        steps = steps.view(-1, 1, 1)
    tail = tail.permute(2, 0, 1).to(tables.collect.dtype)  # (D, B, up to C)
    end = tables.states(torch.bmm(tail, tables.collect[:, size - tail.size(2) :]).transpose(0, 1))
    return y, end if before is None else end + c.decayed(tables.states(before), steps)


def last_steps(x: Tensor, count: int, lengths: Optional[Tensor]) -> Tensor:
    """The last `count` steps of each row, zeros first if it has fewer: (B, L, D) -> (B, count, D)."""
    if lengths is None:
        return F.pad(x, (0, 0, max(0, count - x.size(1)), 0))[:, -count:] if count else x[:, :0]
    at = lengths.unsqueeze(1) + torch.arange(-count, 0, device=x.device)  # (B, count)
    steps = x.gather(1, at.clamp_min(0).unsqueeze(-1).expand(-1, -1, x.size(2)))
    return steps.masked_fill((at < 0).unsqueeze(-1), 0.0)


def state_after(x: Tensor, c: Any) -> Tensor:
    """The state after x (B, L, D) in one direction, from a state of zeros and without outputs, as in `in_blocks`."""
    size = min(x.size(1), BLOCK)
    tables = c.block_tables(size)
    xs = F.pad(x.to(tables.collect.dtype), (0, 0, -x.size(1) % size, 0))  # leading zeros do not change a state of zeros
    xs = xs.transpose(1, 2).unflatten(2, (-1, size)).transpose(0, 1).flatten(1, 2)  # (D, B K, C)
    blocks = _blocks_first(torch.bmm(xs, tables.collect), x.size(0))  # (K, B, D, M)
    later = size * torch.arange(len(blocks) - 1, -1, -1, device=x.device)  # steps
    return c.decayed(tables.states(blocks), later.view(-1, 1, 1, 1)).sum(0)


# ---------------------------------------------------------------------------------------------- the scan over blocks


def _forward(x, initial, within, collect, spread, decay) -> Tuple[Tensor, Tensor]:
    size, dtype = within.size(1), within.dtype
    xs = channels_first(x, size, dtype)
    if collect is None:
        return channels_last(torch.bmm(xs, within), x), within.new_empty(0)
    decay = _complex_if_pairs(decay)
    u = _like(decay, _blocks_first(torch.bmm(xs, collect), x.size(0)))
    initial = None if initial is None else _like(decay, initial.contiguous())
    enter = _reals(_scan(u, decay, initial, back=False))
    return channels_last(torch.baddbmm(torch.bmm(_blocks_last(enter), spread), xs, within), x), enter


def _fake(x, initial, within, collect, spread, decay):
    shape = (0,) if collect is None else (x.size(1) // within.size(1), x.size(0), x.size(2), collect.size(2))
    return torch.empty_like(x), within.new_empty(shape)


def _backward(grads, saved, x, initial, within, collect, spread, decay) -> List[Tensor]:
    (dy, denter), (enter,), (size, dtype) = grads, saved, (within.size(1), within.dtype)
    dy = torch.zeros_like(x) if dy is None else dy
    dys, xt = channels_first(dy, size, dtype), channels_first(x, size, dtype).transpose(1, 2)  # xt (D, C, B K)
    if collect is None:
        return [channels_last(torch.bmm(dys, within.transpose(1, 2)), x), torch.bmm(xt, dys)]
    dh = _blocks_first(torch.bmm(dys, spread.transpose(1, 2)), x.size(0))
    dh = dh if denter is None else dh + denter
    # Gradients flow in the opposite direction, with the conjugate: du_k is that of the state after block k.
    decay = torch.conj_physical(_complex_if_pairs(decay))
    dh, conjugate = _like(decay, dh), torch.conj_physical(_like(decay, enter))
    du = _scan(dh, decay, None, back=True)
    ndim = decay.size(-1)
    dinitial = [] if initial is None else [_reals(torch.addcmul(dh[0, ..., :ndim], decay[0], du[0, ..., :ndim]))]
    ddecay = torch.einsum("kbdm,kbdm->dm", du, conjugate).unflatten(1, (-1, ndim)).transpose(0, 1)
    ddecay = torch.view_as_real(ddecay) if ddecay.is_complex() else ddecay
    dus, enters = _blocks_last(_reals(du)), _blocks_last(enter)
    dtables = [torch.bmm(xt, dys), torch.bmm(xt, dus), torch.bmm(enters.transpose(1, 2), dys), ddecay]
    del xt, enters
    dxs = torch.bmm(dus, collect.transpose(1, 2)).baddbmm_(dys, within.transpose(1, 2))
    return [channels_last(dxs, x), *dinitial, *dtables]


# x (B, K C, D) -> y, and the states before the blocks (K, B, D, M); without `collect`, for one block, (0,). Channels
# come first inside, so that every product is a batched matrix product over channels. With autograd's own gradient, the
# EMA takes 1.0 (8,192 tokens) to 1.4 times the time (a sentence): it would transpose gradients as views, which matrix
# products then read slowly.
block_scan = operator(
    "block_scan(Tensor x, Tensor? initial, Tensor within, Tensor? collect, Tensor? spread, Tensor? decay) "
    "-> (Tensor, Tensor)",
    _forward,
    _fake,
    _backward,
)


def _complex_if_pairs(decay: Tensor) -> Tensor:
    return torch.view_as_complex(decay.contiguous()) if decay.dim() == 4 else decay


def _like(decay: Tensor, h: Tensor) -> Tensor:
    """States (..., 2 N) as complex numbers (..., N) if the decay is complex."""
    return torch.view_as_complex(h.unflatten(-1, (-1, 2))) if decay.is_complex() else h


def _reals(h: Tensor) -> Tensor:
    """The inverse of `_like`."""
    return torch.view_as_real(h).flatten(-2) if h.is_complex() else h


def _scan(u: Tensor, decay: Tensor, initial: Optional[Tensor], back: bool) -> Tensor:
    """h_{k+1} = decay h_k + u_k: u (K, B, D, M) -> the state before each k; the second direction from the end.

    `back` exchanges the directions.
    """
    states = torch.empty_like(u, memory_format=torch.contiguous_format)
    run = _one_after_the_other if on_cpu(u) else _by_doubling
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


def channels_first(x: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """(B, K C, D) -> (D, B K, C). A transposed 2-D copy is four times as fast as a permuted 3-D one."""
    return x.reshape(-1, x.size(-1)).to(dtype).t().contiguous().view(x.size(-1), -1, size)


def channels_last(xs: Tensor, like: Tensor) -> Tensor:
    """(D, B K, C) -> (B, K C, D) in the dtype of `like`."""
    return xs.view(xs.size(0), -1).to(like.dtype).t().contiguous().view(like.shape)


def _blocks_first(h: Tensor, batch: int) -> Tensor:
    """(D, B K, M) -> (K, B, D, M)."""
    return h.view(h.size(0), batch, -1, h.size(-1)).permute(2, 1, 0, 3)


def _blocks_last(h: Tensor) -> Tensor:
    """(K, B, D, M) -> (D, B K, M)."""
    return h.permute(2, 1, 0, 3).reshape(h.size(2), -1, h.size(3))


def pad_to_multiple(x: Tensor, size: int) -> Tensor:
    rest = -x.size(1) % size
    return F.pad(x, (0, 0, 0, rest)) if rest else x
