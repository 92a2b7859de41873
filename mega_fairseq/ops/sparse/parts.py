"""Sparse attention as dense attention within small groups of queries and keys, in tiles that fit into the cache.

A `Part` gives every query some of its keys, such as the band of the last l places. `attend_parts` takes one softmax
over the keys of all parts: their results are joined by their highest scores and their sums, as in flash attention, so
that nothing of size n x M outlives its tile but the bool mask of dropout. Backward computes the weights again. It keeps
both numbers, since the logarithm of the sum would be lost beside a large score.
"""

import math
from typing import Any, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor

from mega_fairseq.ops.attention.scores import MASKED
from mega_fairseq.ops.attention.tiles import TILE_SCORES_GPU
from mega_fairseq.ops.backend import on_cpu
from mega_fairseq.ops.dropout import keep_mask
from mega_fairseq.ops.operators import operator
from mega_fairseq.ops.precision import at_least_float32

TILE_SCORES = 2**17  # scores of a tile on the CPU, so that these and their gradients stay in the L2 cache
ROWS = 64  # of a tile; few, so that most keys after its rows are left out
LOG_2 = math.log(2.0)
FAR = 2**40  # more than any distance
ALL = -FAR  # a `start` before all rows, from where each sees all keys


class Part(NamedTuple):
    """How queries and keys form groups, and which keys of its group a query sees.

    Row r of group g is the query at g step + r stride, and key j of the group that at g step + j stride + first.
    The row sees the key if 0 <= r - place(j) <= span; place(j) = j // width * block + j % width * within + start.
    """

    groups: int  # I
    rows: int  # R queries in a group
    keys: int  # M keys in a group
    step: int
    stride: int = 1
    first: int = 0
    start: int = ALL
    span: int = 2 * FAR
    width: int = 1
    block: int = 1
    within: int = 0
    outside: int = 0  # 1: a row sees all other keys instead
    missing: int = 0  # first keys of the first group, which are before the first real one

    def queries_of(self, x: Tensor) -> Tensor:
        """(N, n, w) -> (N, I, R, w), a view."""
        return self._groups_of(x, 0, self.rows)

    def keys_of(self, x: Tensor) -> Tensor:
        """(N, m, w) -> (N, I, M, w), a view, in which groups may overlap."""
        return self._groups_of(x, self.first, self.keys)

    def _groups_of(self, x: Tensor, first: int, count: int) -> Tensor:
        strides = x.stride(0), self.step * x.stride(1), self.stride * x.stride(1), x.stride(2)
        offset = x.storage_offset() + first * x.stride(1)
        return x.as_strided((x.size(0), self.groups, count, x.size(2)), strides, offset)

    def seen(self, rows: slice) -> slice:
        """A range of a group's keys that has all that these rows see, and at least one key."""
        if self.outside:
            return slice(0, self.keys)
        first = max(0, min(self.keys - 1, self._key_at(rows.start - self.span)))
        return slice(first, max(first + 1, min(self.keys, self._key_at(rows.stop - 1) + self.width)))

    def _key_at(self, place: int) -> int:
        """The first key of the last block that begins at this place or before."""
        return (place - self.start) // self.block * self.width

    def mask(self, rows: slice, keys: slice, like: Tensor) -> Optional[Tensor]:
        """(R', M') to add to the scores of the last M' of these keys; all rows see those before."""
        first = keys.start
        if not self.outside and self.span >= FAR:
            first = max(first, self._key_at(rows.start) + (0 if self.within else self.width))
        if first >= keys.stop:
            return None
        key = torch.arange(first, keys.stop, device=like.device)
        places = key // self.width * self.block + key % self.width * self.within + self.start
        distance = torch.arange(rows.start, rows.stop, device=like.device).unsqueeze(1) - places
        seen = (distance >= 0) & (distance <= self.span)
        # Adding a float mask is eight times as fast on the CPU as masked_fill_ with a bool one.
        return (seen == bool(self.outside)).to(at_least_float32(like.dtype)).mul_(MASKED)


def attend_parts(
    q: Tensor, k: Tensor, v: Tensor, padding: Optional[Tensor], parts: Sequence[Part], dropout: float = 0.0
) -> Tensor:
    """Attention of q (N, n, z) to k (N, m, z) and v (N, m, e) of all parts under one softmax: (N, n, e).

    `padding` is (N, m, 1) bool, True = pad. A query that sees no key gives 0. Exponentials are to base 2, since torch's
    exp2 is several times as fast as exp: q is already divided by sqrt(z) log(2).
    """
    keep, scale = [], 1.0
    for part in parts:
        mask, scale = keep_mask((q.size(0), part.groups, part.rows, part.keys), dropout, q.device)
        keep += [] if mask is None else [mask]
    return _sparse_attention(q, k, v, padding, keep, [number for part in parts for number in part], scale)[0]


def _decode(code: List[int]) -> List[Part]:
    size = len(Part._fields)
    return [Part(*code[start : start + size]) for start in range(0, len(code), size)]


# ------------------------------------------------------------------------------------------- tiles


class _Tile(NamedTuple):
    sequences: slice
    groups: slice
    rows: slice
    keys: slice
    mask: Optional[Tensor]  # of `Part`

    def of_rows(self, x: Tensor) -> Tensor:
        """(N, I, R, w) -> (N' I', R', w)."""
        return x[self[:3]].flatten(0, 1)

    def of_keys(self, x: Tensor) -> Tensor:
        """(N, I, M, w) -> (N' I', M', w)."""
        return x[self.sequences, self.groups, self.keys].flatten(0, 1)


def _tiles(part: Part, q: Tensor) -> Iterator[_Tile]:
    limit = TILE_SCORES if on_cpu(q) else TILE_SCORES_GPU
    height = min(part.rows, max(1, limit // part.keys), ROWS)
    for start in range(0, part.rows, height):
        rows = slice(start, min(start + height, part.rows))
        keys = part.seen(rows)
        mask = part.mask(rows, keys, q)
        together = max(1, limit // ((keys.stop - keys.start) * height))
        step, within = max(1, together // part.groups), min(part.groups, together)
        for s in range(0, q.size(0), step):
            for g in range(0, part.groups, within):
                last = min(s + step, q.size(0)), min(g + within, part.groups)
                yield _Tile(slice(s, last[0]), slice(g, last[1]), rows, keys, mask)


def _scores(q: Tensor, k: Tensor, padding: Optional[Tensor], part: Part, tile: _Tile) -> Tensor:
    """q (N' I', R', z), k (N' I', M', z), padding (N, I, M, 1) -> (N' I', R', M'), in float32 or better."""
    scores = torch.bmm(q, k.transpose(1, 2)).to(at_least_float32(q.dtype))
    if tile.mask is not None:
        scores[..., -tile.mask.size(1) :].add_(tile.mask)  # `+=` would also copy the result to itself
    if padding is not None:
        scores.add_(tile.of_keys(padding).transpose(1, 2) * MASKED)
    if tile.groups.start == 0 and tile.keys.start < part.missing:
        scores[:: tile.groups.stop, :, : part.missing - tile.keys.start] = MASKED
    return scores


def _forward(q, k, v, padding, keep, code, scale) -> Tuple[Tensor, Tensor, Tensor]:
    """The result, and for each query its highest score and the sum of 2^(score - highest)."""
    _, top, total = _fake(q, k, v)
    out = top.new_empty(*q.shape[:2], v.size(2))
    for number, part in enumerate(_decode(code)):
        queries, *results = (part.queries_of(t) for t in (q, out, total, top))
        keys, values, pads = (None if t is None else part.keys_of(t) for t in (k, v, padding))
        for tile in _tiles(part, q):
            weights = _scores(tile.of_rows(queries), tile.of_keys(keys), pads, part, tile)
            highest = weights.amax(-1, keepdim=True)
            count = weights.sub_(highest).exp2_().sum(-1, keepdim=True)
            if keep:
                weights.mul_(keep[number][tile[:4]].flatten(0, 1)).mul_(scale)
            y = torch.bmm(weights.to(v.dtype), tile.of_keys(values)).to(out.dtype)
            targets = [t[tile[:3]] for t in results]
            y, count, highest = (t.view(target.shape) for t, target in zip((y, count, highest), targets))
            if number:
                own_out, own_total, own_top = targets
                joined = torch.maximum(own_top, highest)
                before, more = torch.exp2(own_top - joined), torch.exp2(highest - joined)
                y = y.mul_(more).addcmul_(own_out, before)
                count, highest = count * more + own_total * before, joined
            for target, result in zip(targets, (y, count, highest)):
                target.copy_(result)
    blind = top < MASKED / 2
    out = out.div_(total).masked_fill_(blind, 0.0).to(v.dtype)
    top.masked_fill_(blind, math.inf)  # 2^(score - top) is 0 for every score
    return out, top, total


def _fake(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tuple[Tensor, Tensor, Tensor]:
    top = q.new_empty(*q.shape[:2], 1, dtype=at_least_float32(q.dtype))
    return v.new_empty(*q.shape[:2], v.size(2)), top, torch.empty_like(top)


def _backward(grads, saved, q, k, v, padding, keep, code, scale) -> List[Tensor]:
    out, top, total = saved
    dout = (grads[0] / total).to(q.dtype)  # in place of dividing the weights
    mean = (dout.to(total.dtype) * out.to(total.dtype)).sum(-1, keepdim=True)  # of each row's gradients of weights
    dq = torch.empty_like(q, dtype=total.dtype)
    dk, dv = (torch.zeros_like(t, dtype=total.dtype) for t in (k, v))
    for number, part in enumerate(_decode(code)):
        queries, douts, tops, means, dqs = (part.queries_of(t) for t in (q, dout, top, mean, dq))
        keys, values, pads, dks, dvs = (None if t is None else part.keys_of(t) for t in (k, v, padding, dk, dv))
        for tile in _tiles(part, q):
            own_q, own_k, own_dout = tile.of_rows(queries), tile.of_keys(keys), tile.of_rows(douts)
            weights = _scores(own_q, own_k, pads, part, tile).sub_(tile.of_rows(tops)).exp2_()
            dweights = torch.bmm(own_dout, tile.of_keys(values).transpose(1, 2)).to(total.dtype)
            dropped = weights
            if keep:
                factor = keep[number][tile[:4]].flatten(0, 1) * scale
                dweights, dropped = dweights.mul_(factor), weights * factor
            dscores = dweights.sub_(tile.of_rows(means)).mul_(weights).to(q.dtype)
            own_dq = dqs[tile[:3]]
            more = torch.bmm(dscores, own_k).view(own_dq.shape)
            own_dq.add_(more) if number else own_dq.copy_(more)
            _add_to_keys(dks, part, tile, torch.bmm(dscores.transpose(1, 2), own_q))
            _add_to_keys(dvs, part, tile, torch.bmm(dropped.to(q.dtype).transpose(1, 2), own_dout))
    return [dq.mul_(LOG_2).to(q.dtype), dk.mul_(LOG_2).to(k.dtype), dv.to(v.dtype)]


def _add_to_keys(target: Tensor, part: Part, tile: _Tile, grad: Tensor) -> None:
    """The transpose of `_Tile.of_keys`."""
    grad = grad.unflatten(0, (-1, tile.groups.stop - tile.groups.start))
    apart = part.step if part.stride == 1 else part.keys  # in so many consecutive keys, groups do not overlap
    for first in range(0, grad.size(2), apart):
        more, place = grad[:, :, first : first + apart], tile.keys.start + first
        target[tile.sequences, tile.groups, place : place + more.size(2)].add_(more)


# Autograd would keep the weights of all tiles, n x M numbers for each part.
_sparse_attention = operator(
    "sparse_attention(Tensor q, Tensor k, Tensor v, Tensor? padding, Tensor[] keep, int[] code, float scale) "
    "-> (Tensor, Tensor, Tensor)",
    _forward,
    _fake,
    _backward,
    saved=slice(3),
)
