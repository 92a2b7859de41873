"""AFT by matrix products, with numbers that cannot overflow.

Keys of one tile of S places reach the rows of another one through a product with a Toeplitz matrix,

    sum_u e^(w(t - u) - omega) e^(k_u - r) v_u        relative to e^(r + omega),

where r is the largest key of the tile and omega the largest w between the tiles, so that nothing exceeds 1. Tiles that
are further apart than the table have w = 0: their sums run along the sequence, relative to the largest key so far.

Within a tile, a row could lose its own keys to a much larger one after it. Sequences and channels where that is
possible are `divided`: there, a tile is a sequence of tiles with one place, in which nothing can be lost. The other
direction is the same, reversed.

Tensors are (H, S, N, X): S places in each of N tiles, X sequences and channels of each head.

The gradients are by hand: autograd would keep the products of every pair of tiles, n x n / S entries for each channel.
"""

import math
from typing import Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mega_fairseq.ops.diagonals import diagonal_sums, toeplitz_matrix
from mega_fairseq.ops.operators import operator
from mega_fairseq.ops.precision import at_least_float32

TILE, SMALL_TILE = 128, 32  # places at most; small ones where w is 0, and on GPUs
SLAB = 2**19  # entries of a tensor that are processed together on the CPU, so that they stay in its cache
SAFE = 60.0  # a tile is one product if the smallest key of a row is at least e^-60 of the largest of its tile


def _spread(x: Tensor) -> float:
    """Between two tiles, w is at least omega less this: smaller weights would vanish, at 80 in float32.

    A row is inexact only if it needs such a weight: if the table rises or falls by more within two tiles.
    """
    return -math.log(torch.finfo(x.dtype).tiny) - 7.0


class Direction(NamedTuple):
    """Weights of the keys before each row."""

    weight: Tensor  # (H, R), by distance
    own: bool  # whether a row sees its own key; otherwise the sequence is reversed

    def at(self, start: int, count: int) -> Tensor:
        """w at distances start, start + 1, ..: (H, count), minus infinity for keys that a row does not see."""
        w = self.weight[:, max(0, start) : start + count]
        w = F.pad(w, (0, count + min(0, start) - w.size(1)))
        if start > 0:
            return w
        return torch.cat([w.new_full((w.size(0), -start + (not self.own)), -math.inf), w[:, not self.own :]], 1)

    def matrix(self, first: int, size: int) -> Tuple[Tensor, Tensor]:
        """e^(w - omega) of rows t and keys u with t - u = 0 at distance `first`: (H, s, s), and omega (H, 1, 1)."""
        w = self.at(first - size + 1, 2 * size - 1)
        omega = w.amax(1, keepdim=True)
        e = torch.exp((w - omega).clamp_min(-_spread(w))).masked_fill(w == -math.inf, 0.0)
        return toeplitz_matrix(e.flip(1), size, size), omega.unsqueeze(-1)

    def add_gradient(self, dweight: Tensor, first: int, dmatrix: Tensor) -> None:
        """Adds the gradient of w, from that of w in the matrix."""
        start = first - dmatrix.size(1) + 1
        d = diagonal_sums(dmatrix).flip(1)[:, max(0, -start) : max(0, dweight.size(1) - start)]
        dweight[:, max(0, start) : max(0, start) + d.size(1)] += d


class Sums(NamedTuple):
    """Numerators and denominators of all rows, relative to e^scale."""

    scale: Tensor
    numerator: Tensor
    denominator: Tensor


def _weighted(k: Tensor, v: Tensor, largest: Tensor) -> Tensor:
    """e^(k - largest) v and e^(k - largest), side by side in the last dimension but one."""
    x = k.new_empty(*k.shape[:-1], 2, k.size(-1))
    e = torch.exp(torch.sub(k, largest, out=x[..., 1, :]), out=x[..., 1, :])
    torch.mul(e, v, out=x[..., 0, :])
    return x


# ------------------------------------------------------------------------------------------- pairs of tiles


class _Past(NamedTuple):
    """The sums over all tiles more than `near` before each."""

    largest: Tensor  # (H, N, X)
    sums: Tensor  # (H, 2, N, X)
    scale: Tensor  # (H, N, X): e^(r - largest) of each tile
    decay: Tensor  # (H, N + 1, X): from the sums before a tile to those after it
    index: Tensor  # (N,): the tiles that belong to each sum, of N + 1


def _running(decay: Tensor, u: Tensor) -> Tensor:
    """c_i = decay_i c_{i-1} + u_i over tiles, by doubling; c_{-1} is 0: decay (H, N, X), u (H, 2, N, X)."""
    stride, count, decay = 1, u.size(2), decay.unsqueeze(1)
    while stride < count:
        now, before = slice(stride, None), slice(0, count - stride)
        u = torch.cat([u[:, :, :stride], torch.addcmul(u[:, :, now], decay[:, :, now], u[:, :, before])], 2)
        decay = torch.cat([decay[:, :, :stride], decay[:, :, now] * decay[:, :, before]], 2)
        stride *= 2
    return u


def _past(x: Tensor, largest: Tensor, older: Optional[Tensor], near: int) -> _Past:
    totals = x.sum(1).transpose(1, 2)  # (H, 2, N, X)
    if older is None:
        start, zero = torch.full_like(largest[:, :1], torch.finfo(x.dtype).min), torch.zeros_like(totals[:, :, :1])
    else:
        start, zero = older[:, :1], older[:, 1:].unsqueeze(2)
    so_far = torch.cat([start, largest], 1).cummax(1).values  # (H, N + 1, X)
    scale = torch.exp(largest - so_far[:, 1:])
    decay = F.pad(torch.exp(so_far[:, :-1] - so_far[:, 1:]), (0, 0, 1, 0))
    sums = _running(decay, torch.cat([zero, totals * scale.unsqueeze(1)], 2))
    index = (torch.arange(largest.size(1), device=x.device) - near).clamp_min(0)
    return _Past(so_far.index_select(1, index), sums.index_select(2, index), scale, decay, index)


def _past_backward(past: _Past, dsums: Tensor) -> Tuple[Tensor, Tensor]:
    """The gradients (H, 2, N, X) of the totals of all tiles, and (H, 2, X) of the older sums."""
    d = dsums.new_zeros(*dsums.shape[:2], past.decay.size(1), dsums.size(3)).index_add(2, past.index, dsums)
    d = _running(F.pad(past.decay[:, 1:], (0, 0, 0, 1)).flip(1), d.flip(2)).flip(2)
    return d[:, :, 1:] * past.scale.unsqueeze(1), d[:, :, 0]


class _Tiles(NamedTuple):
    """Pairs of tiles, with one reference for all keys of a row."""

    x: Tensor  # (H, S, N, 2, X): e^(k - r) v and e^(k - r)
    ref: Tensor  # (H, N, X)
    pairs: List[Tuple[int, Tensor, Tensor]]  # how far apart, the matrix, and e^(r + omega - ref) (H, M, X)
    past: Optional[Tuple[_Past, Tensor]]  # and e^(largest - ref)


def _tiles(k: Tensor, v: Tensor, direction: Direction, older: Optional[Tensor], nearest: int) -> Optional[_Tiles]:
    """Pairs of tiles from `nearest` tiles apart."""
    size, count = k.shape[1:3]
    near = -(-(direction.weight.size(1) - 1) // size)  # tiles further apart have w = 0
    if count == nearest and older is None:
        return None
    largest = k.amax(1)
    x = _weighted(k, v, largest.unsqueeze(1))
    ref = torch.full_like(largest, torch.finfo(k.dtype).min)
    pairs, past = [], None
    for j in range(nearest, min(near + 1, count)):
        w, omega = direction.matrix(j * size, size)
        scale = largest[:, : count - j] + omega
        ref[:, j:] = torch.maximum(ref[:, j:], scale)
        pairs.append((j, w, scale))
    if count - 1 > near or older is not None:
        past = _past(x, largest, older, near)
        ref = torch.maximum(ref, past.largest)
    return _Tiles(
        x,
        ref,
        [(j, w, torch.exp(scale - ref[:, j:])) for j, w, scale in pairs],
        None if past is None else (past, torch.exp(past.largest - ref)),
    )


def _tile_sums(tiles: _Tiles) -> Tensor:
    """(H, S, N, 2, X) relative to e^ref."""
    count = tiles.ref.size(1)
    sums = torch.zeros_like(tiles.x)
    for j, w, factor in tiles.pairs:
        x = tiles.x[:, :, : count - j] * factor[:, None, :, None]
        sums[:, :, j:].flatten(2).baddbmm_(w, x.flatten(2))
    if tiles.past is not None:
        past, factor = tiles.past
        sums += (past.sums * factor.unsqueeze(1)).transpose(1, 2).unsqueeze(1)
    return sums


# ------------------------------------------------------------------------------------------- forward and backward


def _each(x: Tensor) -> Tensor:
    """Each tile as a sequence of tiles with one place."""
    return x.flatten(2).unsqueeze(1)


def sums_before(k: Tensor, v: Tensor, direction: Direction, older: Optional[Tensor], divided: bool) -> Sums:
    """The sums over the keys before each row, and its own."""
    tiles, sums = _tiles(k, v, direction, older, int(divided)), None
    if tiles is not None:
        sums = Sums(tiles.ref.unsqueeze(1).expand_as(k), *_tile_sums(tiles).unbind(3))
    if not divided:
        return sums
    own = Sums(*(t.reshape(k.shape) for t in sums_before(_each(k), _each(v), direction, None, False)))
    return own if sums is None else joined(own, sums)


def joined(one: Sums, other: Sums) -> Sums:
    scale = torch.maximum(one.scale, other.scale)
    a, b = (torch.exp(each.scale - scale) for each in (one, other))
    return Sums(scale, one.numerator * a + other.numerator * b, one.denominator * a + other.denominator * b)


class Gradients(NamedTuple):
    k: Tensor
    v: Tensor
    weight: Tensor
    older: Optional[Tensor]  # (H, 3, X), 0 for the largest key, which is a reference


def _factor(ref: Tensor, log_denominator: Tensor) -> Tensor:
    return torch.exp((ref - log_denominator).clamp_max_(_spread(ref)))


def _both(g: Tensor, go: Tensor, factor: Tensor) -> Tensor:
    """g and -go times a factor, side by side in the last dimension but one."""
    y = g.new_empty(*g.shape[:-1], 2, g.size(-1))
    torch.mul(g, factor, out=y[..., 0, :])
    torch.mul(go, factor, out=y[..., 1, :]).neg_()
    return y


def sums_before_backward(
    k: Tensor,
    v: Tensor,
    log_denominator: Tensor,
    g: Tensor,
    go: Tensor,
    direction: Direction,
    older: Optional[Tensor],
    divided: bool,
) -> Gradients:
    """The gradients in one direction: g is that of the outputs o, and go = g o."""
    dolder = None
    if divided:
        inside = (_each(t) for t in (k, v, log_denominator, g, go))
        dk, dv, dweight, _ = sums_before_backward(*inside, direction, None, False)
        dk, dv = dk.view_as(k), dv.view_as(v)
    else:
        dk, dv, dweight = (torch.zeros_like(t) for t in (k, v, direction.weight))
    tiles = _tiles(k, v, direction, older, int(divided))
    if tiles is not None:
        count, size = tiles.ref.size(1), k.size(1)
        y = _both(g, go, _factor(tiles.ref.unsqueeze(1), log_denominator))  # (H, S, N, 2, X)
        dx = torch.zeros_like(y)
        for j, w, factor in tiles.pairs:
            rows = y[:, :, j:].flatten(2)
            more = torch.bmm(w.transpose(1, 2), rows).view(dx[:, :, : count - j].shape)
            factor = factor[:, None, :, None]
            dx[:, :, : count - j].addcmul_(more, factor)
            x = (tiles.x[:, :, : count - j] * factor).flatten(2)
            direction.add_gradient(dweight, j * size, torch.bmm(rows, x.transpose(1, 2)).mul_(w))
        if tiles.past is not None:
            past, factor = tiles.past
            dtotals, dstart = _past_backward(past, y.sum(1).transpose(1, 2) * factor.unsqueeze(1))
            dolder = F.pad(dstart, (0, 0, 1, 0))
            dx += dtotals.transpose(1, 2).unsqueeze(1)
        dx.mul_(tiles.x[:, :, :, 1:])
        dv += dx[:, :, :, 0]
        dk += dx[:, :, :, 1]
        dk.addcmul_(dx[:, :, :, 0], v)
    return Gradients(dk, dv, dweight, dolder)


def to_divide(k: Tensor, direction: Direction) -> Tensor:
    """Where a row may lose its own keys to a larger one of its tile: (H, X) bool."""
    w = direction.at(0, k.size(1))
    least = w.amax(1, keepdim=True) - w[:, int(not direction.own) :][:, :1] - SAFE  # (H, 1)
    largest = k.amax(1)  # (H, N, X)
    divided = (k.amin(1) - largest < least.unsqueeze(-1)).any(1)
    if divided.any():  # perhaps because of pads, which do not count
        real = k.masked_fill(k <= torch.finfo(k.dtype).min, math.inf)
        divided = (real.amin(1) - largest < least.unsqueeze(-1)).any(1)
    return divided


# ------------------------------------------------------------------------------------------- slabs of channels


def _tile_size(tokens: int, reach: int, device: torch.device) -> int:
    """Places of a tile. Independent of the batch, since no row's digits may depend on it."""
    most = TILE if reach > SMALL_TILE and device.type == "cpu" else SMALL_TILE
    return -(-tokens // -(-tokens // most))


class _Slab(NamedTuple):
    """Channels of whole heads, or of a part of one head."""

    channels: slice
    heads: slice
    size: int  # places of a tile
    tokens: int

    def tiles(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """(G, n, D), the last n tokens -> (H, S, N, G C)."""
        x, heads = x[..., self.channels].to(at_least_float32(x.dtype)), self.heads.stop - self.heads.start
        front, back = self.tokens - x.size(1), -self.tokens % self.size
        if front or back:
            x = F.pad(x, (0, 0, front, back), value=fill)
        x = x.unflatten(2, (heads, -1)).unflatten(1, (-1, self.size))  # (G, N, S, H, C)
        return x.permute(3, 2, 1, 0, 4).flatten(3).contiguous()

    def put(self, x: Tensor, into: Tensor) -> None:
        """The inverse of `tiles`: writes x (H, S, N, G C) to these channels of (G, n, D)."""
        x = x.unflatten(3, (into.size(0), -1)).permute(3, 2, 1, 0, 4)  # (G, N, S, H, C)
        x = x.reshape(x.size(0), -1, x.size(3) * x.size(4))
        into[..., self.channels] = x[:, self.tokens - into.size(1) : self.tokens]

    def older(self, older: Optional[Tensor]) -> Optional[Tensor]:
        """(3, G, D) -> (H, 3, G C)."""
        if older is None:
            return None
        return (
            older[..., self.channels]
            .unflatten(2, (self.heads.stop - self.heads.start, -1))
            .permute(2, 0, 1, 3)
            .flatten(2)
        )

    def put_older(self, x: Tensor, into: Tensor) -> None:
        into[..., self.channels] = x.unflatten(2, (into.size(1), -1)).permute(1, 2, 0, 3).flatten(2)


def _slabs(k: Tensor, ahead: Tensor) -> Iterator[_Slab]:
    (groups, tokens, dim), heads = k.shape, ahead.size(0)
    most = min(dim, max(1, SLAB // (groups * tokens))) if k.device.type == "cpu" else dim
    width, size = dim // heads, _tile_size(tokens, ahead.size(1), k.device)
    count = most // width * width or next(n for n in range(most, 0, -1) if width % n == 0)
    for start in range(0, dim, count):
        stop = min(dim, start + count)
        yield _Slab(slice(start, stop), slice(start // width, max(start // width + 1, stop // width)), size, tokens)


def _directions(slab: _Slab, ahead: Tensor, back: Optional[Tensor]) -> List[Direction]:
    own = [Direction(ahead[slab.heads], True)]
    return own if back is None else [*own, Direction(back[slab.heads], False)]


def _flip(x: Tensor, direction: Direction) -> Tensor:
    return x if direction.own else x.flip(1, 2)


class _Columns(NamedTuple):
    """Sequences and channels of a slab: which are divided. None for all."""

    index: Optional[Tensor]
    divided: bool

    def of(self, x: Optional[Tensor]) -> Optional[Tensor]:
        return x if x is None or self.index is None else x.index_select(-1, self.index)


def _columns(k: Tensor, directions: Sequence[Direction]) -> List[_Columns]:
    """A GPU would have to wait for the keys: there, all are divided."""
    if k.device.type != "cpu":
        return [_Columns(None, True)]
    divided = torch.stack([to_divide(_flip(k, each), each) for each in directions]).flatten(0, 1).any(0)  # (X,)
    if not divided.any():
        return [_Columns(None, False)]
    parts = [_Columns(part.nonzero().squeeze(1), way) for part, way in ((~divided, False), (divided, True))]
    return [part for part in parts if part.index.numel()]


def _together(parts: List[Tensor], columns: List[_Columns]) -> Tensor:
    """The inverse of `_Columns.of` for all parts."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts, -1).index_select(-1, torch.cat([each.index for each in columns]).argsort())


def _forward(
    k: Tensor, v: Tensor, ahead: Tensor, back: Optional[Tensor], older: Optional[Tensor], queries: int
) -> Tuple[Tensor, Tensor]:
    out, log_denominators = _fake(k, v, ahead, back, older, queries)
    for slab in _slabs(k, ahead):
        keys, values, before = slab.tiles(k, torch.finfo(ahead.dtype).min), slab.tiles(v), slab.older(older)
        directions, results = _directions(slab, ahead, back), []
        columns = _columns(keys, directions)
        for part in columns:
            own, sums = [part.of(t) for t in (keys, values)], []
            for each in directions:
                found = sums_before(*(_flip(t, each) for t in own), each, part.of(before), part.divided)
                sums.append(Sums(*(_flip(t, each) for t in found)))
            total = sums[0] if len(sums) == 1 else joined(*sums)
            results.append((total.numerator / total.denominator, total.scale + torch.log(total.denominator)))
        for target, parts in zip((out, log_denominators), zip(*results)):
            slab.put(_together(parts, columns), target)
    return out, log_denominators


def _fake(k, v, ahead, back, older, queries) -> Tuple[Tensor, Tensor]:
    out = v.new_empty(v.size(0), queries, v.size(2))
    return out, torch.empty_like(out, dtype=ahead.dtype)


def _backward(grads, saved, k, v, ahead, back, older, queries) -> List[Tensor]:
    dout, (out, log_denominators) = grads[0], saved
    grads = [torch.zeros_like(t) for t in (k, v, ahead, back, older) if t is not None]
    lowest, highest = torch.finfo(ahead.dtype).min, torch.finfo(ahead.dtype).max
    # A row that sees pads alone has no gradient.
    log_denominators = log_denominators.masked_fill(log_denominators < lowest / 2, highest)
    for slab in _slabs(k, ahead):
        keys, values, rows = slab.tiles(k, lowest), slab.tiles(v), slab.tiles(log_denominators, highest)
        g = slab.tiles(dout)
        every, before = (keys, values, rows, g, g * slab.tiles(out)), slab.older(older)
        directions, results = _directions(slab, ahead, back), []
        columns = _columns(keys, directions)
        for part in columns:
            own, total = [part.of(t) for t in every], None
            for each, dweight in zip(directions, grads[2:]):
                d = sums_before_backward(*(_flip(t, each) for t in own), each, part.of(before), part.divided)
                dweight[slab.heads] += d.weight
                keys_values = [_flip(t, each) for t in d[:2]]
                total = keys_values if total is None else [a.add_(b) for a, b in zip(total, keys_values)]
            results.append([*total, *([] if older is None else [d.older])])
        found = [_together(parts, columns) for parts in zip(*results)]
        for x, into in zip(found[:2], grads):
            slab.put(x, into)
        if older is not None:
            slab.put_older(found[2], grads[-1])
    return grads


# `aft_naive` of keys and values (G, m, D) -> o (G, n, D) and the logarithms of its denominators. `ahead` (H, R) are the
# weights by distance of keys before each row, `back` of those after it. `older` (3, G, D) is `Sums`.
aft_tiles = operator(
    "aft",
    "Tensor k, Tensor v, Tensor ahead, Tensor? back, Tensor? older, int queries",
    "(Tensor, Tensor)",
    _forward,
    _fake,
    _backward,
    saved=slice(2),
)
