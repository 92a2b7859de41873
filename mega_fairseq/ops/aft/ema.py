"""AFT whose weights by distance are a multi-dimensional damped EMA (Mega, eq. 3-5), so that it needs no window.

    o_t = sum_u W(t - u) e^(k_u) v_u / sum_u W(t - u) e^(k_u),   W(j) = sum_n c_n phi_n^j        for each channel

The numerator and the denominator are two EMAs with N states each. Overflow is impossible in these variables, for each
channel and n: lambda, the logarithm of the sum of phi^(t-u) e^(k_u), and mu, the mean of v with these weights.

    lambda_t = log(phi e^(lambda_{t-1}) + e^(k_t)),   mu_t = mu_{t-1} + (v_t - mu_{t-1}) e^(k_t - lambda_t)
    o_t = sum_n softmax_n(log c + lambda_t) mu_t

`ema_aft_step` is this for one token. Whole sequences are computed in tiles of S places: sums relative to the largest
key of a tile go through a Toeplitz product in it, and through N states between tiles, relative to the largest key so
far, which decays like the slowest state. Where such sums vanish, all is computed in lambda and mu, entry by entry. A
GPU would wait for this check. There, and in compiled models, the largest key decays within tiles too, and the weights
within a tile are computed entry by entry, so that no sum vanishes.
"""

import math
from typing import List, NamedTuple, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mega_fairseq.ops.aft import aft_naive
from mega_fairseq.ops.aft.slabs import SAFE, SLAB, channels_first, channels_last
from mega_fairseq.ops.aft.tiles import Plan, exact, running
from mega_fairseq.ops.derivatives import once_differentiable
from mega_fairseq.ops.diagonals import toeplitz_matrix
from mega_fairseq.ops.precision import is_compiling, without_autocast
from mega_fairseq.ops.sequence_parallel import Slices

TILE_TOKENS = 64


class Means(NamedTuple):
    """The state: for each channel and n, in float32 or better."""

    log_weight: Tensor  # lambda (B, D, N), the lowest number without tokens
    mean: Tensor  # mu (B, D, N)


def no_means(k: Tensor, log_decay: Tensor) -> Means:
    zero = log_decay.new_zeros(k.size(0), *log_decay.shape)
    return Means(torch.full_like(zero, torch.finfo(zero.dtype).min), zero)


def log_kernel(log_decay: Tensor, log_mix: Tensor, length: int) -> Tensor:
    """log W at distances 0, 1, ..: log_decay and log_mix, the logarithm of c (D, N) -> (D, length)."""
    distances = torch.arange(length, device=log_decay.device, dtype=log_decay.dtype)
    return torch.logsumexp(log_mix.unsqueeze(-1) + log_decay.unsqueeze(-1) * distances, 1)


def ema_aft_naive(k: Tensor, v: Tensor, log_decay: Tensor, log_mix: Tensor) -> Tensor:
    """The definition, with the kernel as a table: k, v (B, n, D) -> o (B, n, D). Two directions if (2, D, N)."""
    if log_decay.dim() == 2:
        return aft_naive(k, v, log_kernel(log_decay, log_mix, k.size(1)))
    ahead, back = (log_kernel(*of, k.size(1)) for of in zip(log_decay, log_mix))  # both include distance 0
    present = torch.logaddexp(ahead[:, :1], back[:, :1])
    return aft_naive(k, v, torch.cat([back[:, 1:].flip(1), present, ahead[:, 1:]], 1), causal=False)


def ema_aft_step(k: Tensor, v: Tensor, log_decay: Tensor, log_mix: Tensor, state: Means) -> Tuple[Tensor, Means]:
    """One token: k, v (B, D) -> o (B, D) in v's dtype, next state."""
    state = _joined(_aged(state, log_decay), Means(*(t.to(log_decay.dtype).unsqueeze(-1) for t in (k, v))))
    o = (torch.softmax(log_mix + state.log_weight, -1) * state.mean).sum(-1)
    return o.to(v.dtype), state


def ema_aft(
    k: Tensor, v: Tensor, log_decay: Tensor, log_mix: Tensor, state: Means, lengths: Optional[Tensor] = None
) -> Tuple[Tensor, Means]:
    """k, v (B, n, D) after `state` -> o (B, n, D) in v's dtype, next state. `lengths` (B,) marks right padding."""
    with without_autocast(k):
        if k.size(1) == 1 and lengths is None:
            o, state = ema_aft_step(k[:, 0], v[:, 0], log_decay, log_mix, state)
            return o.unsqueeze(1), state
        if lengths is None:
            lengths = torch.full((k.size(0),), k.size(1), device=k.device)
        arguments = (channels_first(k), channels_first(v), log_decay, log_mix, *_channels_of(state), lengths, None)
        o, *after = _in_slabs(*arguments)
        return channels_last(o, v), Means(*(t.transpose(0, 1) for t in after))


def ema_aft_of_slice(
    k: Tensor, v: Tensor, log_decay: Tensor, log_mix: Tensor, before: Means, slices: Slices
) -> Tuple[Tensor, Means]:
    """`ema_aft` of this process's slice, where `before` is before all slices -> o, the means after all slices.

    The means of a slice come from a pass of their own, since outputs are not linear in the means before it.
    """
    _, own = ema_aft(k, v, log_decay, log_mix, no_means(k, log_decay))
    every = slices.gather(torch.stack(own)).unbind(1)  # (S, B, D, N) twice

    def after(count: int) -> Means:
        log_weight, mean = (torch.cat([t.unsqueeze(0), of[:count]]) for t, of in zip(before, every))
        ages = F.pad(slices.ages(count, log_decay), (1, 0), value=float(count * slices.width))
        return _pooled(log_weight + log_decay * ages.view(-1, 1, 1, 1), mean, 0)

    o, _ = ema_aft(k, v, log_decay, log_mix, after(slices.rank))
    return o, after(slices.group.size)


def bidirectional_ema_aft(
    k: Tensor, v: Tensor, log_decay: Tensor, log_mix: Tensor, padding: Optional[Tensor] = None
) -> Tensor:
    """Weights in both directions, each including distance 0: log_decay, log_mix (2, D, N) -> (B, n, D)."""
    with without_autocast(k):
        lengths = torch.zeros(k.size(0), dtype=torch.long, device=k.device)
        if padding is not None:
            k = k.masked_fill(padding.unsqueeze(-1), torch.finfo(k.dtype).min)
        tables = (log_decay.transpose(0, 1), log_mix.transpose(0, 1))  # (D, 2, N)
        state = _channels_of(no_means(k, log_decay[0]))
        o, *_ = _in_slabs(channels_first(k), channels_first(v), *tables, *state, lengths, padding)
        return channels_last(o, v)


# ------------------------------------------------------------------------------------------- means


def _channels_of(state: Means) -> Tuple[Tensor, Tensor]:
    return tuple(t.transpose(0, 1) for t in state)


def _aged(state: Means, log_decay: Tensor) -> Means:
    return Means(state.log_weight + log_decay, state.mean)


def _joined(one: Means, other: Means) -> Means:
    """The means over the tokens of both."""
    log_weight = torch.logaddexp(one.log_weight, other.log_weight)
    share = torch.sigmoid(other.log_weight - one.log_weight)
    return Means(log_weight, torch.lerp(*torch.broadcast_tensors(one.mean, other.mean, share)))


def _pooled(log_weights: Tensor, values: Tensor, dim: int) -> Means:
    """The mean of values with these weights along a dimension."""
    return Means(torch.logsumexp(log_weights, dim), (torch.softmax(log_weights, dim) * values).sum(dim))


# ------------------------------------------------------------------------------------------- tiles, channels first


class _Tables(NamedTuple):
    """The parameters of one direction: (C, N) each."""

    log_decay: Tensor
    log_mix: Tensor


class _Part(NamedTuple):
    """Numerators and denominators, relative to e^reference."""

    reference: Tensor  # (C, G, M, 1) or (C, G, M, S)
    sums: Tensor  # (C, 2, G, M, S)


def _times(x: Tensor, table: Tensor) -> Tensor:
    """(C, ..., a) times (C, a, b) -> (C, ..., b)."""
    return torch.bmm(x.reshape(x.size(0), -1, x.size(-1)), table).view(*x.shape[:-1], table.size(-1))


def _log_powers(log_decay: Tensor, first: int, count: int) -> Tensor:
    """t log phi for t = first .. first + count - 1: (C, N) -> (C, count, N)."""
    t = torch.arange(first, first + count, device=log_decay.device, dtype=log_decay.dtype)
    return t.unsqueeze(-1) * log_decay.unsqueeze(1)


def _by_products(k: Tensor, v: Tensor, t: _Tables, state: Means, own: bool) -> Tuple[List[_Part], Means, Tensor]:
    """The sums of k, v (C, G, M, S) and `state` (C, G, N), in parts; the means (C, G, M + 1, N) before each tile; and
    the smallest sum that these were divided by.

    Without the own tile, references decay in a tile like the slowest state, whose sums are the largest: none vanishes.
    """
    size, lowest = k.size(-1), torch.finfo(k.dtype).min
    slowest = t.log_decay.detach().amax(-1, keepdim=True)  # (C, 1)

    def decayed_by(first: int) -> Tensor:
        return _log_powers(slowest, first, size).transpose(1, 2).unsqueeze(1)  # (C, 1, 1, S)

    relative, k = (t.log_decay, k) if own else (t.log_decay - slowest, k + decayed_by(0).flip(-1))
    largest = k.detach().amax(-1)  # r (C, G, M)
    e = torch.exp(k - largest.unsqueeze(-1))
    x = torch.stack([e * v, e], 1)  # (C, 2, G, M, S)

    # Before each tile and after the last: the largest key so far, which decays like the slowest state.
    start = state.log_weight.detach().amax(-1, keepdim=True)  # (C, G, 1)
    decayed = size * slowest.unsqueeze(-1) * torch.arange(k.size(2) + 1, device=k.device)  # (C, 1, M + 1)
    so_far = (torch.cat([start, largest], -1) - decayed).cummax(-1).values + decayed  # (C, G, M + 1)

    collect = torch.exp(_log_powers(relative, 0, size).flip(1))  # (C, S, N): from an input to the state after it
    spread = torch.exp(_log_powers(relative, 1, size) + t.log_mix.unsqueeze(1)).transpose(1, 2)  # (C, N, S)
    u = _times(x, collect) * torch.exp(largest - so_far[..., 1:])[:, None, ..., None]  # (C, 2, G, M, N)
    first = torch.exp(state.log_weight - start) * (start > lowest)
    first = torch.stack([first * state.mean, first], 1).unsqueeze(3)  # (C, 2, G, 1, N)
    decay = torch.exp((so_far[..., :-1] - so_far[..., 1:]).unsqueeze(-1) + size * t.log_decay[:, None, None])
    h = running(F.pad(decay, (0, 0, 1, 0)).unsqueeze(1), torch.cat([first, u], 3), 3)  # (C, 2, G, M + 1, N)

    before = so_far[..., :-1].unsqueeze(-1)
    parts = [_Part(before if own else before + decayed_by(1), _times(h[:, :, :, :-1], spread))]
    if own:
        within = toeplitz_matrix(F.pad(torch.exp(log_kernel(*t, size)), (size - 1, 0)), size, size)  # (C, S, S)
        parts.append(_Part(largest.unsqueeze(-1), _times(x, within)))
    numerator, denominator = h.unbind(1)
    denominator = denominator.clamp_min(torch.finfo(k.dtype).tiny)
    smallest = denominator.detach().masked_fill(so_far.unsqueeze(-1) == lowest, 1.0).amin()
    return parts, Means(so_far.unsqueeze(-1) + torch.log(denominator), numerator / denominator), smallest


def _by_entries(k: Tensor, v: Tensor, t: _Tables, state: Means) -> Tuple[List[_Part], Means, Tensor]:
    """The sums of all but the own tile, and the means, for any numbers: 2 N exponentials for each entry."""
    size = k.size(-1)
    entries = k.unsqueeze(-1) + _log_powers(t.log_decay, 0, size).flip(1)[:, None, None]  # (C, G, M, S, N)
    of_tiles = _pooled(entries, v.unsqueeze(-1), 3)  # (C, G, M, N)
    means = Means(*(torch.cat([a.unsqueeze(2), b], 2) for a, b in zip(state, of_tiles)))
    stride = 1
    while stride <= k.size(2):  # by doubling
        ends = Means(*(m[:, :, stride:] for m in means))
        aged = _aged(Means(*(m[:, :, :-stride] for m in means)), size * stride * t.log_decay[:, None, None])
        means = Means(*(torch.cat([m[:, :, :stride], j], 2) for m, j in zip(means, _joined(aged, ends))))
        stride *= 2
    before = Means(*(m[:, :, :-1].unsqueeze(3) for m in means))  # (C, G, M, 1, N)
    shares = before.log_weight + (_log_powers(t.log_decay, 1, size) + t.log_mix.unsqueeze(1))[:, None, None]
    reference = shares.detach().amax(-1)
    shares = torch.exp(shares - reference.unsqueeze(-1))
    return [_Part(reference, torch.stack([(shares * before.mean).sum(-1), shares.sum(-1)], 1))], means, k.new_ones(())


def _own_by_entries(k: Tensor, v: Tensor, t: _Tables) -> _Part:
    plan = Plan(k.size(-1), near=0, exact=0, causal=True)
    reference, sums = exact(k.unsqueeze(1), v.unsqueeze(1), log_kernel(*t, plan.size), plan, 0)
    return _Part(reference.squeeze(1), sums.squeeze(2))


FAST, OWN_ENTRIES, ALL_ENTRIES = range(3)


def _parts(k: Tensor, v: Tensor, t: _Tables, state: Means, how: int) -> Tuple[List[_Part], Means, Tensor]:
    if how == ALL_ENTRIES:
        parts, means, smallest = _by_entries(k, v, t, state)
    else:
        parts, means, smallest = _by_products(k, v, t, state, own=how == FAST)
    return parts if how == FAST else [*parts, _own_by_entries(k, v, t)], means, smallest


def _after(k: Tensor, v: Tensor, t: _Tables, means: Means, lengths: Tensor) -> Means:
    """The means after `lengths` (G,) tokens from those before each tile."""
    size = k.size(-1)
    tiles = lengths // size
    index = tiles.view(1, -1, 1, 1)
    before = Means(*(m.gather(2, index.expand(k.size(0), -1, 1, m.size(-1))).squeeze(2) for m in means))
    index = index.clamp_max(k.size(2) - 1).expand(k.size(0), -1, 1, size)
    k, v = (x.gather(2, index).squeeze(2) for x in (k, v))  # (C, G, S), with the tokens behind the last whole tile
    rest = lengths - tiles * size
    ages = rest.unsqueeze(1) - 1 - torch.arange(size, device=k.device)  # (G, S)
    entries = k.unsqueeze(-1) + ages.clamp_min(0).to(k.dtype).unsqueeze(-1) * t.log_decay[:, None, None]
    pooled = _pooled(entries.masked_fill((ages < 0).unsqueeze(-1), torch.finfo(k.dtype).min), v.unsqueeze(-1), 2)
    joined = _joined(_aged(before, rest.to(k.dtype).view(-1, 1) * t.log_decay.unsqueeze(1)), pooled)
    some = (rest > 0).view(-1, 1)
    return Means(*(torch.where(some, a, b) for a, b in zip(joined, before)))


def _rows(
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    log_mix: Tensor,
    log_weight: Tensor,
    mean: Tensor,
    lengths: Tensor,
    padding: Optional[Tensor],
    how: int,
) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """o (C, G, n) of k, v (C, G, n), the next means, and the smallest sum that was divided by."""
    dtype, length, causal = log_decay.dtype, k.size(2), log_decay.dim() == 2
    size = -(-length // -(-length // TILE_TOKENS))
    state, lowest = Means(log_weight, mean), torch.finfo(dtype).min
    back = -length % size
    k, v = (x.to(dtype) for x in (k, v))
    if back:
        k = F.pad(k, (0, back), mode="replicate") if causal else F.pad(k, (0, back), value=lowest)
        v = F.pad(v, (0, back))
    k, v = (x.view(*x.shape[:2], -1, size) for x in (k, v))
    after, of_states = state, torch.ones((), dtype=dtype, device=k.device)
    if causal:
        tables = _Tables(log_decay, log_mix)
        parts, means, of_states = _parts(k, v, tables, state, how)
        after = _after(k, v, tables, means, lengths)
    else:
        ahead, behind = (_Tables(log_decay[:, i], log_mix[:, i]) for i in (0, 1))
        parts, *_ = _parts(k, v, ahead, state, how)
        turned, *_ = _parts(k.flip(2, 3), v.flip(2, 3), behind, state, how)
        parts += [_Part(part.reference.flip(2, 3), part.sums.flip(3, 4)) for part in turned]
    reference = parts[0].reference
    for part in parts[1:]:
        reference = torch.maximum(reference, part.reference)
    sums = sum(part.sums * torch.exp(part.reference - reference).unsqueeze(1) for part in parts)
    numerator, denominator = (s.flatten(2)[..., :length] for s in sums.unbind(1))
    denominator = denominator.clamp_min(torch.finfo(dtype).tiny)
    smallest = denominator.detach() if padding is None else denominator.detach().masked_fill(padding, 1.0)
    return numerator / denominator, *after, torch.minimum(smallest.amin(), of_states)


# ------------------------------------------------------------------------------------------- slabs


def _in_slabs(*arguments: Optional[Tensor]) -> Tuple[Tensor, Tensor, Tensor]:
    """o (D, G, n) and the next means (D, G, N), from the arguments of `_rows` for all channels."""
    return _rows(*arguments, OWN_ENTRIES)[:3] if is_compiling() else _InSlabs.apply(*arguments)


class _InSlabs(torch.autograd.Function):
    """`_rows` for some channels at a time, which computes them again for backward, so that only inputs are saved."""

    @staticmethod
    def forward(ctx, *arguments):
        *tensors, lengths, padding = arguments
        k, _, _, _, log_weight, _ = tensors
        results = [torch.empty_like(k), torch.empty_like(log_weight), torch.empty_like(log_weight)]
        checked = k.device.type == "cpu"
        count = max(1, SLAB // k[0].numel()) if checked else k.size(0)
        ctx.how = []

        def compute(start: int, stop: int, how: int) -> bool:
            """Whether the results for these channels are right; if so, keeps them."""
            *of_slab, smallest = _rows(*(t[start:stop] for t in tensors), lengths, padding, how)
            if how == FAST and not float(smallest) > math.exp(-SAFE):
                return False
            ctx.how.append((slice(start, stop), how))
            for into, part in zip(results, of_slab):
                into[start:stop] = part
            return True

        for start in range(0, k.size(0), count):
            stop = min(k.size(0), start + count)
            if not compute(start, stop, FAST if checked else OWN_ENTRIES):
                few = max(1, count // log_weight.size(-1))  # since tensors are N times as large
                for first in range(start, stop, few):
                    compute(first, min(stop, first + few), ALL_ENTRIES)
        ctx.save_for_backward(*arguments)
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        *tensors, lengths, padding = ctx.saved_tensors
        results = [torch.empty_like(t) for t in tensors]
        with without_autocast(tensors[0]):
            for channels, how in ctx.how:
                leaves = [t[channels].detach().requires_grad_() for t in tensors]
                with torch.enable_grad():
                    *outputs, _ = _rows(*leaves, lengths, padding, how)
                of_slab = torch.autograd.grad(
                    outputs, leaves, [g[channels] for g in gradients], allow_unused=True, materialize_grads=True
                )
                for into, part in zip(results, of_slab):
                    into[channels] = part
        return (*results, None, None)
