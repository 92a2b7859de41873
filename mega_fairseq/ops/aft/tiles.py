"""AFT by matrix products, with numbers that cannot overflow.

Keys of one tile of S places reach the rows of another one through a product with a Toeplitz matrix,

    sum_u e^(w(t - u) - omega) e^(k_u - r) v_u        relative to e^(r + omega),

where r is the largest key of the tile and omega the largest w between the tiles, so that nothing exceeds 1. Tiles that
are further apart than the table have w = 0: their sums run along the sequence, relative to the largest key so far.
Each of these is a *term* of a row's numerator and denominator.

Within a tile, a causal row could lose its own keys to a much larger one after it. Such rows, which are rare, get
another term without the larger keys.

Tensors are (H, S, N, X): S places in each of N tiles, X sequences and channels of each head.
"""

import logging
import math
from functools import lru_cache
from itertools import chain
from typing import Any, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mega_fairseq.ops.backend import on_cpu
from mega_fairseq.ops.diagonals import toeplitz_matrix
from mega_fairseq.ops.operators import differentiable, operator
from mega_fairseq.ops.precision import at_least_float32

logger = logging.getLogger(__name__)

TILE, SMALL_TILE = 128, 32  # places at most; small ones where w is 0, and on GPUs
SLAB = 2**19  # entries of a tensor that are processed together on the CPU, so that they stay in its cache
SAFE = 60.0  # a row keeps its digits if its largest key is at least e^-60 of the reference
EVERY = slice(None)


def _spread(x: Tensor) -> float:
    """How far the logarithm of a weight between two tiles may lie below the largest one: 80 in float32.

    Smaller weights vanish. A row needs one only if the table rises or falls by more within two tiles.
    """
    return -math.log(torch.finfo(x.dtype).tiny) - 7.0


# ------------------------------------------------------------------------------------------- terms


class Term(NamedTuple):
    """A part of the sums over keys of M tiles of rows: matrix @ x, relative to e^ref."""

    tiles: slice
    keys: Optional[slice]  # the tiles that x is a part of, or None if it has gradients of its own
    matrix: Tensor  # (H, S, s)
    x: Sequence[Tensor]  # (H, s, M, X) each: e^(k - r) v and e^(k - r)
    ref: Tensor  # (H, 1, M, X), a constant
    rows: Optional[Tensor] = None  # (H, S, M, X) bool: those that it is exact for, by default all


class Table(NamedTuple):
    """Weights by distance t - u: (H, R), or (H, 2 R - 1) if not causal."""

    weight: Tensor
    causal: bool
    tokens: int

    @property
    def reach(self) -> int:
        return self.weight.size(1) if self.causal else self.weight.size(1) // 2 + 1

    def matrix(self, apart: int, size: int) -> Tuple[Tensor, Tensor, Tensor]:
        """e^(w - omega) from keys to rows `apart` tiles later: (H, S, S), omega and the smallest w (H, 1, 1, 1)."""
        first, end = (apart - 1) * size + 1, (apart + 1) * size
        start, stop = max(first, 0 if self.causal else 1 - self.tokens), min(end, self.tokens)  # distances that occur
        zero = 0 if self.causal else self.reach - 1  # the index of distance 0
        w = F.pad(self.weight, (-start - zero, stop + zero - self.weight.size(1)))  # also cuts
        least, omega = w.detach().aminmax(dim=1, keepdim=True)
        e = torch.exp((w - omega).clamp_min(-_spread(w)))
        matrix = toeplitz_matrix(F.pad(e, (start - first, end - stop)).flip(1), size, size)
        return matrix, omega[..., None, None], least[..., None, None]


def weighted(k: Tensor, v: Tensor, largest: Tensor) -> Tuple[Tensor, Tensor]:
    e = torch.exp(k - largest)
    return e * v, e


def inside_tiles(k: Tensor, v: Tensor, x: Sequence[Tensor], largest: Tensor, table: Table) -> Iterator[Term]:
    """Keys in the tile of a row: the first term is for all rows, later ones replace it for some rows.

    x is `weighted` by the largest keys of tiles (H, 1, N, X). A GPU would have to wait for the keys to know how many
    terms are needed, and computes as many as there could be.
    """
    matrix, omega, least = table.matrix(0, k.size(1))
    lowest, waits = torch.finfo(k.dtype).min, on_cpu(k)
    margin = (SAFE + least - omega).clamp_min(0.0)
    if not table.causal or (waits and not (k[:, :1] < largest - margin).any()):  # the first row sees the fewest keys
        yield Term(EVERY, EVERY, matrix, [t.detach() for t in x], largest + omega)
        return
    so_far = k.detach().cummax(1).values
    rows = so_far >= largest - margin
    left = ~rows
    yield Term(EVERY, EVERY, matrix, [t.detach() for t in x], largest + omega, rows)
    for _ in range(1, k.size(1)):
        if waits and not left.any():
            return
        largest = so_far.masked_fill(~left, lowest).amax(1, keepdim=True)
        rows = left & (so_far >= largest - margin)
        left = left & ~rows
        seen = weighted(k.masked_fill(k > largest, lowest), v, largest)
        matrix, _, _ = table.matrix(0, k.size(1))  # again, since torch differentiates each term alone
        yield Term(EVERY, None, matrix, seen, largest + omega, rows)


def between_tiles(x: Sequence[Tensor], largest: Tensor, table: Table) -> Iterator[Term]:
    """Keys in other tiles: all terms that a row has."""
    size, count = x[0].shape[1:3]
    near = -(-(table.reach - 1) // size)  # tiles further apart have w = 0
    for distance in range(1, min(near + 1, count)):
        for apart in (distance,) if table.causal else (distance, -distance):
            rows, keys = (slice(max(i, 0), count + min(i, 0)) for i in (apart, -apart))
            matrix, omega, _ = table.matrix(apart, size)
            yield Term(rows, keys, matrix, [t.detach()[:, :, keys] for t in x], largest[:, :, keys] + omega)
    if count - 1 > near:
        yield _past(x, largest, near)
    if count - 1 > near and not table.causal:
        future = _past(tuple(t.flip(2) for t in x), largest.flip(2), near)
        yield future._replace(x=tuple(t.flip(2) for t in future.x), ref=future.ref.flip(2))


def _past(x: Sequence[Tensor], largest: Tensor, near: int) -> Term:
    """The sums over all tiles more than `near` before each."""
    totals = torch.stack([t.sum(1) for t in x], 2)  # (H, N, 2, X)
    so_far = F.pad(largest.squeeze(1), (0, 0, 1, 0), value=torch.finfo(totals.dtype).min).cummax(1).values
    sums = F.pad(totals * torch.exp(largest.squeeze(1) - so_far[:, 1:]).unsqueeze(2), (0, 0, 0, 0, 1, 0))
    decay = F.pad(torch.exp(so_far[:, :-1] - so_far[:, 1:]), (0, 0, 1, 0)).unsqueeze(2)
    stride = 1
    while stride < sums.size(1):  # c_i = decay_i c_{i-1} + u_i, by doubling
        now, before = slice(stride, None), slice(0, -stride)
        sums = torch.cat([sums[:, :stride], torch.addcmul(sums[:, now], decay[:, now], sums[:, before])], 1)
        decay = torch.cat([decay[:, :stride], decay[:, now] * decay[:, before]], 1)
        stride *= 2
    index = (torch.arange(totals.size(1), device=totals.device) - near).clamp_min(0)
    sums, ref = (t.index_select(1, index).unsqueeze(1) for t in (sums, so_far))
    return Term(EVERY, None, totals.new_ones(*x[0].shape[:2], 1), sums.unbind(3), ref)


# ------------------------------------------------------------------------------------------- slabs of channels


class _Slab(NamedTuple):
    """Channels of whole heads, or of a part of one head."""

    channels: slice
    heads: slice
    size: int  # places of a tile

    def split(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """(G, n, D) -> (H, S, N, G C)."""
        x, pads = x[..., self.channels].to(at_least_float32(x.dtype)), -x.size(1) % self.size
        x = (F.pad(x, (0, 0, 0, pads), value=fill) if pads else x).unflatten(1, (-1, self.size))
        return x.unflatten(3, (self.heads.stop - self.heads.start, -1)).permute(3, 2, 1, 0, 4).flatten(3).contiguous()

    def put(self, x: Tensor, into: Tensor) -> None:
        """The inverse of `split`: writes x (H, S, N, G C) to these channels of (G, n, D)."""
        x = x.unflatten(3, (into.size(0), -1)).permute(3, 2, 1, 0, 4).flatten(3)  # (G, N, S, H C)
        into[..., self.channels] = x.flatten(1, 2)[:, : into.size(1)]


def _slabs(k: Tensor, table: Table) -> Iterator[_Slab]:
    (groups, tokens, dim), heads = k.shape, table.weight.size(0)
    most = min(dim, max(1, SLAB // (groups * tokens))) if on_cpu(k) else dim
    width, places = dim // heads, TILE if table.reach > SMALL_TILE and on_cpu(k) else SMALL_TILE
    size = -(-tokens // -(-tokens // places))  # independent of the batch, since no row's digits may depend on it
    count = most // width * width or next(n for n in range(most, 0, -1) if width % n == 0)
    for start in range(0, dim, count):
        stop = min(dim, start + count)
        yield _Slab(slice(start, stop), slice(start // width, max(start // width + 1, stop // width)), size)


def _references(terms: List[Term], like: Tensor) -> Tuple[Tensor, List[Tensor]]:
    """The largest reference of tiles (H, 1, N, X), and e^(that of a term, less the largest)."""
    ref = torch.full_like(like[:, :1], torch.finfo(like.dtype).min)
    for term in terms:
        ref[:, :, term.tiles] = torch.maximum(ref[:, :, term.tiles], term.ref)
    return ref, [torch.exp(term.ref - ref[:, :, term.tiles]) for term in terms]


def _sums(terms: List[Term], like: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
    """Numerators and denominators (H, S, N, X), relative to e^ref, and ref."""
    ref, factors = _references(terms, like)
    totals = torch.zeros_like(like), torch.zeros_like(like)
    for term, factor in zip(terms, factors):
        for total, x in zip(totals, term.x):
            total[:, :, term.tiles].flatten(2).baddbmm_(term.matrix, (x * factor).flatten(2))
    return (*totals, ref)


def _joined(one: Sequence[Tensor], other: Sequence[Tensor]) -> List[Tensor]:
    ref = torch.maximum(one[2], other[2])
    a, b = (torch.exp(each[2] - ref) for each in (one, other))
    return [x * a + y * b for x, y in zip(one[:2], other[:2])] + [ref]


def _rows(numerators: Tensor, denominators: Tensor, ref: Tensor) -> Tuple[Tensor, Tensor]:
    return numerators / denominators, ref + torch.log(denominators)


@lru_cache(maxsize=None)
def _log_slowness() -> None:
    logger.warning("the token mixer aft is slow on a GPU; take gmlp, or attention with a chunk size")


def _forward(k: Tensor, v: Tensor, weight: Tensor, causal: bool) -> Tuple[Tensor, Tensor]:
    if not on_cpu(k):
        _log_slowness()
    results, lowest = _fake(k, v, weight), torch.finfo(weight.dtype).min
    for slab in _slabs(k, Table(weight, causal, k.size(1))):
        table = Table(weight[slab.heads], causal, k.size(1))
        keys, values = slab.split(k, lowest), slab.split(v)
        largest = keys.amax(1, keepdim=True)
        x = weighted(keys, values, largest)
        inside = inside_tiles(keys, values, x, largest, table)
        between = list(between_tiles(x, largest, table))
        rows, others = _rows(*_sums([next(inside), *between], keys)), None
        for term in inside:
            others = others or _sums(between, keys)
            exact = _rows(*_joined(_sums([term], keys), others))
            rows = [torch.where(term.rows, *pair) for pair in zip(exact, rows)]
        for result, part in zip(results, rows):
            slab.put(part, result)
    return results


def _fake(k: Tensor, v: Tensor, weight: Tensor, *_: Any) -> Tuple[Tensor, Tensor]:
    return torch.empty_like(v), torch.empty_like(v, dtype=weight.dtype)


def _backward(grads, saved, k, v, weight, causal) -> List[Tensor]:
    """Torch's derivatives, term by term, of the sum of y (matrix @ x), where y are the gradients of a row's sums.

    It equals the sum of x (matrix^T @ y), and the product in it is the gradient of x: nothing is computed twice.
    """
    (out, log_denominators), lowest, highest = saved, torch.finfo(weight.dtype).min, torch.finfo(weight.dtype).max
    # A row that sees pads alone has no gradient.
    log_denominators = log_denominators.masked_fill(log_denominators < lowest / 2, highest)
    dk, dv, dweight = (torch.zeros_like(t) for t in (k, v, weight))
    for slab in _slabs(k, Table(weight, causal, k.size(1))):
        grad, scale = slab.split(grads[0]), slab.split(log_denominators, highest)
        y = grad, (grad * slab.split(out)).neg_()
        if grads[1] is not None:
            y[1].add_(slab.split(grads[1]))
        inputs = slab.split(k, lowest), slab.split(v), weight[slab.heads]
        keys, values, part = (t.detach().requires_grad_() for t in inputs)
        largest, table = keys.detach().amax(1, keepdim=True), Table(part, causal, k.size(1))
        with differentiable():
            x = weighted(keys, values, largest)
            leaves = tuple(t.detach().requires_grad_() for t in x)
            for t in leaves:
                t.grad = torch.zeros_like(t)
            inside = inside_tiles(keys, values, leaves, largest, table)
            first, between = next(inside), list(between_tiles(leaves, largest, table))
            _differentiate([first, *between] if first.rows is None else between, y, scale, leaves)
            for term in () if first.rows is None else chain([first], inside):
                _differentiate([term], y, scale.masked_fill(~term.rows, highest), leaves)
            torch.autograd.backward(x, [t.grad for t in leaves])
        slab.put(keys.grad, dk)
        slab.put(values.grad, dv)
        dweight[slab.heads] += part.grad
    return [dk, dv, dweight]


def _differentiate(terms: List[Term], y: Sequence[Tensor], log_denominators: Tensor, leaves: Sequence[Tensor]) -> None:
    """Adds the gradients of terms to those of their matrices and of the leaves, which are x of all tiles."""
    ref, factors = _references(terms, log_denominators)
    rows = torch.exp((ref - log_denominators).clamp_max_(_spread(ref)))
    limit = torch.finfo(ref.dtype).max ** 0.75  # sums of gradients stay finite where all weights of a row vanish
    scaled = [(t * rows).clamp_(-limit, limit) for t in y]
    for term, factor in zip(terms, factors):
        outputs = []
        for x, grad, leaf in zip(term.x, scaled, leaves):
            product = torch.bmm(term.matrix.transpose(1, 2), grad[:, :, term.tiles].flatten(2)).view(x.shape)
            if product.requires_grad:
                outputs.append((product, x.detach() * factor))
            if term.keys is None:
                outputs.append((x, product.detach() * factor))
            else:
                leaf.grad[:, :, term.keys].addcmul_(product.detach(), factor)
        torch.autograd.backward(*zip(*outputs))


# `aft_naive` of keys and values (G, n, D) -> o (G, n, D) and the logarithms of its denominators. Autograd would keep
# the products of every pair of tiles, n x n / S entries for each channel.
aft_tiles = operator(
    "aft(Tensor k, Tensor v, Tensor weight, bool causal) -> (Tensor, Tensor)",
    _forward,
    _fake,
    _backward,
    saved=slice(2),
)
