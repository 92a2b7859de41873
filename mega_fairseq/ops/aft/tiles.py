"""AFT in tiles of S places: products of Toeplitz matrices between pairs of tiles, with numbers that cannot overflow.

Channels come first: keys and values are (H, C, G, N, S), C channels of each of H heads, G sequences, N tiles. A pair
of tiles j apart is one product with e^(w(jS + t - u) - omega_j), where omega_j is the largest w of the pair, and with
E = e^(k - r), where r is the largest key of a tile. Numerators (E v) and denominators (E) go through it together. The
sums of a row of tiles are relative to e^ref, the largest of r + omega_j, so that nothing exceeds 1. Tiles further
apart than the table have w = 0: their sums run along the sequence, relative to the largest key so far.

A causal row whose own keys are all much smaller than a later one of its tile would be 0 / 0. Pairs up to `exact` apart
are therefore computed entry by entry, relative to the largest entry of the row, and joined with the rest.
"""

from typing import List, NamedTuple, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mega_fairseq.ops.diagonals import diagonal_sums, toeplitz_matrix

LARGEST_FACTOR = 80.0  # exponents of e^(ref - log denominator) are below it wherever the tiles are accurate


class Plan(NamedTuple):
    """How to divide the work."""

    size: int  # S places of a tile
    near: int  # pairs of tiles up to this far apart have weights; beyond, w = 0
    exact: int  # pairs up to this far apart are computed entry by entry; -1: none
    causal: bool

    def pairs(self) -> List[int]:
        """The distances j between tiles of which products are made; tile i sees tile i - j."""
        far = range(self.exact + 1, self.near + 1)
        return [*far] if self.causal else sorted({*far, *(-j for j in far)})


class Older(NamedTuple):
    """Sums of tokens before the first, relative to e^largest, all with w = 0."""

    largest: Tensor  # (H, C, G)
    sums: Tensor  # (H, 2, C, G): numerator and denominator


class Tiles(NamedTuple):
    """Everything that the products need, from keys and values."""

    x: Tensor  # (H, 2, C, G, N, S): E v and E
    largest: Tensor  # r (H, C, G, N)


def log_weights(weight: Tensor, causal: bool, first: int, count: int) -> Tensor:
    """w at distances first, first + 1, ..: (H, count), 0 beyond the table, the lowest number for the future."""
    zero, size = (0, weight.size(1)) if causal else (weight.size(1) // 2, weight.size(1))
    start, stop = first + zero, first + zero + count
    part = weight[:, min(size, max(0, start)) : min(size, max(0, stop))]
    before = min(count, max(0, -start))
    part = F.pad(part, (before, 0), value=torch.finfo(weight.dtype).min if causal else 0.0)
    return F.pad(part, (0, count - part.size(1)))


def _pair_weights(weight: Tensor, plan: Plan, j: int) -> Tuple[Tensor, Tensor]:
    """e^(w(jS + t - u) - omega_j) by u and t (H, S, S), and omega_j (H, 1, 1, 1)."""
    size = plan.size
    w = log_weights(weight, plan.causal, (j - 1) * size + 1, 2 * size - 1)
    omega = w.detach().amax(1, keepdim=True)
    return toeplitz_matrix(torch.exp(w - omega), size, size), omega.view(-1, 1, 1, 1)


def make_tiles(k: Tensor, v: Tensor) -> Tiles:
    largest = k.detach().amax(-1)
    e = torch.exp(k - largest.unsqueeze(-1))
    return Tiles(torch.stack([e * v, e], 1), largest)


def _spans(tiles: int, first: int, j: int) -> Tuple[slice, slice]:
    """Of the pairs j apart: the rows of tiles, counted from `first` on, and the tiles that they see."""
    start, stop = max(first, j), min(tiles, tiles + j)
    stop = max(start, stop)
    return slice(start - first, stop - first), slice(start - j, stop - j)


def _product(x: Tensor, w: Tensor) -> Tensor:
    """(H, ..., S) times (H, S, S)."""
    return torch.bmm(x.reshape(x.size(0), -1, x.size(-1)), w).view(x.shape)


# ------------------------------------------------------------------------------------------- running sums


def running(decay: Tensor, u: Tensor, dim: int = -1) -> Tensor:
    """c_i = decay_i c_{i-1} + u_i along a dimension, by doubling; c_{-1} is 0. `decay` broadcasts to u elsewhere."""
    stride, count = 1, u.size(dim)
    while stride < count:
        before, after = u.narrow(dim, 0, count - stride), u.narrow(dim, stride, count - stride)
        u = torch.cat(
            [u.narrow(dim, 0, stride), torch.addcmul(after, decay.narrow(dim, stride, count - stride), before)], dim
        )
        both = decay.narrow(dim, stride, count - stride) * decay.narrow(dim, 0, count - stride)
        decay = torch.cat([decay.narrow(dim, 0, stride), both], dim)
        stride *= 2
    return u


class _Past(NamedTuple):
    """The sums over all tiles more than `near` before each."""

    largest: Tensor  # (H, C, G, N)
    sums: Tensor  # (H, 2, C, G, N)
    scale: Tensor  # (H, C, G, N): e^(r - largest) of each tile
    decay: Tensor  # (H, C, G, N + 1): from the sums before a tile to those after it
    index: Tensor  # (N,): the tiles that belong to each sum, of N + 1


def _past(tiles: Tiles, plan: Plan, first: int, older: Optional[Older]) -> _Past:
    x, largest = tiles
    totals = x.sum(-1)  # (H, 2, C, G, N)
    if older is None:
        start, zero = torch.full_like(largest[..., :1], torch.finfo(x.dtype).min), torch.zeros_like(totals[..., :1])
    else:
        start, zero = older.largest.unsqueeze(-1), older.sums.unsqueeze(-1)
    so_far = torch.cat([start, largest], -1).cummax(-1).values  # (H, C, G, N + 1)
    scale = torch.exp(largest - so_far[..., 1:])
    decay = F.pad(torch.exp(so_far[..., :-1] - so_far[..., 1:]), (1, 0))
    sums = running(decay.unsqueeze(1), torch.cat([zero, totals * scale.unsqueeze(1)], -1))
    index = (torch.arange(first, largest.size(-1), device=x.device) - plan.near).clamp_min(0)
    return _Past(so_far.index_select(-1, index), sums.index_select(-1, index), scale, decay, index)


def _past_backward(past: _Past, dsums: Tensor) -> Tuple[Tensor, Tensor]:
    """The gradients of the totals of all tiles, and of the older sums."""
    decay = F.pad(past.decay[..., 1:], (0, 1)).unsqueeze(1)
    d = dsums.new_zeros(*dsums.shape[:-1], past.decay.size(-1)).index_add(-1, past.index, dsums)
    d = running(decay.flip(-1), d.flip(-1)).flip(-1)
    return d[..., 1:] * past.scale.unsqueeze(1), d[..., 0]


def _reversed(tiles: Tiles) -> Tiles:
    return Tiles(tiles.x.flip(-2), tiles.largest.flip(-1))


def _all_past(tiles: Tiles, plan: Plan, first: int, older: Optional[Older]) -> List[Tuple[_Past, bool]]:
    """The sums before and, for bidirectional AFT, after the tiles near each tile; True: in reversed order."""
    if tiles.largest.size(-1) - 1 <= plan.near and older is None:
        return []
    before = (_past(tiles, plan, first, older), False)
    return [before] if plan.causal else [before, (_past(_reversed(tiles), plan, 0, None), True)]


# ------------------------------------------------------------------------------------------- products of tiles


class Products(NamedTuple):
    """The sums of all that is not computed entry by entry."""

    ref: Tensor  # (H, C, G, M) for the rows of tiles from `first` on
    sums: Tensor  # (H, 2, C, G, M, S), relative to e^ref


class _Factors(NamedTuple):
    ref: Tensor
    pairs: List[Tuple[int, slice, slice, Tensor, Tensor]]  # j, rows, columns, weights, factor
    past: List[Tuple[_Past, bool, Tensor]]  # and its factor


def _factors(tiles: Tiles, weight: Tensor, plan: Plan, first: int, older: Optional[Older]) -> _Factors:
    largest = tiles.largest
    count = largest.size(-1)
    ref = torch.full_like(largest[..., first:], torch.finfo(largest.dtype).min)
    pairs, past = [], _all_past(tiles, plan, first, older)
    for j in plan.pairs():
        rows, columns = _spans(count, first, j)
        if rows.start < rows.stop:
            w, omega = _pair_weights(weight, plan, j)
            scale = largest[..., columns] + omega
            pairs.append((j, rows, columns, w, scale))
            ref[..., rows] = torch.maximum(ref[..., rows], scale)
    for sums, reverse in past:
        ref = torch.maximum(ref, sums.largest.flip(-1) if reverse else sums.largest)
    return _Factors(
        ref,
        [(j, rows, columns, w, torch.exp(scale - ref[..., rows])) for j, rows, columns, w, scale in pairs],
        [(p, reverse, torch.exp((p.largest.flip(-1) if reverse else p.largest) - ref)) for p, reverse in past],
    )


def products(tiles: Tiles, weight: Tensor, plan: Plan, first: int, older: Optional[Older]) -> Products:
    f = _factors(tiles, weight, plan, first, older)
    sums = torch.zeros_like(tiles.x[..., first:, :])
    for _, rows, columns, w, factor in f.pairs:
        sums[..., rows, :] += _product(tiles.x[..., columns, :] * factor[:, None, ..., None], w)
    for past, reverse, factor in f.past:
        of_past = past.sums.flip(-1) if reverse else past.sums
        sums += (of_past * factor.unsqueeze(1)).unsqueeze(-1)
    return Products(f.ref, sums)


def products_backward(
    tiles: Tiles, weight: Tensor, plan: Plan, first: int, older: Optional[Older], y: Tensor, log_denominator: Tensor
) -> Tuple[Tensor, Tensor, Optional[Tensor]]:
    """Gradients of x, of w and of the older sums, from y (H, 2, C, G, M, S), the gradient of numerators and
    denominators relative to the e^log_denominator (H, C, G, M, S) of their rows."""
    f = _factors(tiles, weight, plan, first, older)
    y = y * torch.exp((f.ref.unsqueeze(-1) - log_denominator).clamp_max(LARGEST_FACTOR)).unsqueeze(1)
    dx, dweight, dolder = torch.zeros_like(tiles.x), torch.zeros_like(weight), None
    for j, rows, columns, w, factor in f.pairs:
        factor, dy = factor[:, None, ..., None], y[..., rows, :]
        dx[..., columns, :] += _product(dy, w.transpose(1, 2)) * factor
        x = tiles.x[..., columns, :] * factor
        heads = x.size(0)
        dw = torch.bmm(x.reshape(heads, -1, plan.size).transpose(1, 2), dy.reshape(heads, -1, plan.size)) * w
        _add_distances(dweight, diagonal_sums(dw), plan, (j - 1) * plan.size + 1)
    for past, reverse, factor in f.past:
        d = y.sum(-1) * factor.unsqueeze(1)
        dtotals, dstart = _past_backward(past, d.flip(-1) if reverse else d)
        dx += (dtotals.flip(-1) if reverse else dtotals).unsqueeze(-1)
        dolder = dolder if reverse else dstart
    return dx, dweight, dolder


def _add_distances(dweight: Tensor, d: Tensor, plan: Plan, first: int) -> None:
    """Adds d (H, n), of distances first, first + 1, .., to the table's gradient; others have no entry in it."""
    start = first + (0 if plan.causal else dweight.size(1) // 2)
    low, high = max(0, start), min(dweight.size(1), start + d.size(1))
    if low < high:
        dweight[:, low:high] += d[:, low - start : high - start]


# ------------------------------------------------------------------------------------------- entry by entry


def _extended(x: Tensor, plan: Plan, first: int, fill: float) -> Tensor:
    """Each tile beside the tiles that it sees entry by entry: (..., N, S) -> (..., M, Q)."""
    if plan.exact == 0:
        return x[..., first:, :]
    before, after = plan.exact, 0 if plan.causal else plan.exact
    padded = F.pad(x, (0, 0, before, after), value=fill)
    parts = [padded[..., i : i + x.size(-2), :] for i in range(before + after + 1)]
    return torch.cat(parts, -1)[..., first:, :]


def _extended_backward(d: Tensor, plan: Plan, first: int) -> Tensor:
    d = F.pad(d, (0, 0, first, 0))
    if plan.exact == 0:
        return d
    before, after = plan.exact, 0 if plan.causal else plan.exact
    total = d.new_zeros(*d.shape[:-2], d.size(-2) + before + after, plan.size)
    for i in range(before + after + 1):
        total[..., i : i + d.size(-2), :] += d[..., i * plan.size : (i + 1) * plan.size]
    return total[..., before : before + d.size(-2), :]


def _distances(plan: Plan) -> range:
    last = (plan.exact + 1) * plan.size - 1
    return range(0 if plan.causal else -last, last + 1)


def _places(plan: Plan, distance: int, width: int) -> Tuple[slice, slice]:
    """Queries of a tile, and the keys at this distance among the `width` of the extended tile."""
    base = plan.exact * plan.size
    start, stop = max(0, distance - base), min(plan.size, width - base + distance)
    return slice(start, stop), slice(base + start - distance, base + stop - distance)


def exact(k: Tensor, v: Tensor, weight: Tensor, plan: Plan, first: int) -> Tuple[Tensor, Tensor]:
    """The largest entry of each row (H, C, G, M, S), and the sums (H, 2, C, G, M, S) relative to it."""
    lowest = torch.finfo(k.dtype).min
    k, v = _extended(k, plan, first, lowest), _extended(v, plan, first, 0.0)
    distances, width = _distances(plan), k.size(-1)
    w = log_weights(weight, plan.causal, distances[0], len(distances))[:, None, None, None, None]
    shape = (*k.shape[:-1], plan.size)
    largest = torch.full(shape, lowest, dtype=k.dtype, device=k.device)
    for i, distance in enumerate(distances):
        rows, keys = _places(plan, distance, width)
        largest[..., rows] = torch.maximum(largest[..., rows], (k[..., keys] + w[..., i]).detach())
    numerator, denominator = torch.zeros_like(largest), torch.zeros_like(largest)
    for i, distance in enumerate(distances):
        rows, keys = _places(plan, distance, width)
        e = torch.exp(k[..., keys] + w[..., i] - largest[..., rows])
        numerator[..., rows] += e * v[..., keys]
        denominator[..., rows] += e
    return largest, torch.stack([numerator, denominator], 1)


def exact_backward(
    k: Tensor, v: Tensor, weight: Tensor, plan: Plan, first: int, g: Tensor, go: Tensor, log_denominator: Tensor
) -> Tuple[Tensor, Tensor, Tensor]:
    """Gradients of k, v and w, from those of the outputs g and go = g o (H, C, G, M, S)."""
    dweight = torch.zeros_like(weight)
    k, v = _extended(k, plan, first, torch.finfo(k.dtype).min), _extended(v, plan, first, 0.0)
    distances, width = _distances(plan), k.size(-1)
    w = log_weights(weight, plan.causal, distances[0], len(distances))[:, None, None, None, None]
    dk, dv, dw = torch.zeros_like(k), torch.zeros_like(v), []
    for i, distance in enumerate(distances):
        rows, keys = _places(plan, distance, width)
        share = torch.exp(k[..., keys] + w[..., i] - log_denominator[..., rows])
        dv[..., keys] += share * g[..., rows]
        d = share * (g[..., rows] * v[..., keys] - go[..., rows])
        dk[..., keys] += d
        dw.append(d.flatten(1).sum(1))
    _add_distances(dweight, torch.stack(dw, 1), plan, distances[0])
    return _extended_backward(dk, plan, first), _extended_backward(dv, plan, first), dweight
