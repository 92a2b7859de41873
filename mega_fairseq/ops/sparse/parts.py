"""Sparse attention as dense attention within small groups of queries and keys, in tiles that fit into the cache.

A `Part` gives every query some of its keys, such as the band of the last l places. It views queries (N, n, .) as groups
(N, I, R, .) and keys (N, m, .) as groups (N, I, M, .), and a query sees keys of its group only. `attend_parts` takes
one softmax over the keys of all parts: their results are joined by their highest scores and their sums, as in flash
attention, so that nothing of size n x M outlives its tile but the bool mask of dropout. Backward computes the weights
again. It keeps both numbers, since the logarithm of the sum would be lost beside a large score.
"""

import math
from itertools import repeat
from typing import Any, Callable, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor

from mega_fairseq.ops.attention.scores import MASKED
from mega_fairseq.ops.attention.tiles import TILE_SCORES_GPU
from mega_fairseq.ops.dropout import keep_mask
from mega_fairseq.ops.operators import operator
from mega_fairseq.ops.precision import at_least_float32

TILE_SCORES = 2**17  # scores of a tile on the CPU, so that these and their gradients stay in the L2 cache
ROWS = 64  # of a tile; few, so that most keys after its rows are left out
LOG_2 = math.log(2.0)


class Keys(NamedTuple):
    k: Tensor  # (N, m, z)
    v: Tensor  # (N, m, e)
    padding: Optional[Tensor] = None  # (N, m, 1) bool, True = pad

    def map(self, function: Callable[..., Tensor], *arguments: Any) -> "Keys":
        return Keys(*(None if t is None else function(t, *arguments) for t in self))


# ------------------------------------------------------------------------------------------- parts


class Blocks(NamedTuple):
    """Queries and keys, each padded to whole blocks."""

    size: int
    queries: int  # blocks
    skipped: int  # blocks of keys before the first block of queries
    causal: bool
    front: int = 0  # blocks of zeros before the first key
    gap: int = 0  # of a column: how many blocks away its first key is
    summary: int = 0  # places of a summary
    first: int = -1  # the place of a block's summary in the block, if queries see that of their own block


class Part:
    """How queries and keys form groups, and which keys of its group a query sees."""

    def __init__(self, blocks: Blocks):
        self.blocks = blocks

    def queries(self, x: Tensor) -> Tensor:
        """(N, n, w) -> (N, I, R, w), a view."""
        return x.unflatten(1, (-1, self.blocks.size))

    def keys(self, x: Tensor) -> Tensor:
        """(N, m, w) -> (N, I, M, w), a view, in which groups may overlap."""
        raise NotImplementedError

    def apart(self, x: Tensor) -> List[Tensor]:
        """The same as views (N, I, M_j, w), each without overlap, side by side: for sums of gradients."""
        return [self.keys(x)]

    def seen(self, rows: slice, count: int) -> slice:
        """A range of a group's keys that has all that these rows see, and at least one key."""
        return slice(0, count)

    def hide(self, scores: Tensor, rows: slice, keys: slice, groups: slice) -> None:
        """Adds MASKED to the scores (N', I', R', M') of keys that rows of groups do not see."""


class Block(Part):
    """The places of a query's own block."""

    def keys(self, x: Tensor) -> Tensor:
        b, blocks = self.blocks, x.unflatten(1, (-1, self.blocks.size))
        return blocks[:, b.front + b.skipped :][:, : b.queries]

    def seen(self, rows: slice, count: int) -> slice:
        return slice(0, rows.stop if self.blocks.causal else count)

    def hide(self, scores: Tensor, rows: slice, keys: slice, groups: slice) -> None:
        if self.blocks.causal:
            _hide_after(scores, rows.start)


class Band(Part):
    """The places at most a block away: of the block before, the own one and, if not causal, the next one."""

    def __init__(self, blocks: Blocks):
        super().__init__(blocks)
        self.before, self.count = blocks.front + blocks.skipped - 1, 2 if blocks.causal else 3  # blocks of keys

    def keys(self, x: Tensor) -> Tensor:
        size, last = self.blocks.size, self.before + self.blocks.queries + self.count - 1
        return x[:, self.before * size : last * size].unfold(1, self.count * size, size).transpose(2, 3)

    def apart(self, x: Tensor) -> List[Tensor]:
        blocks = x.unflatten(1, (-1, self.blocks.size))
        return [blocks[:, self.before + j :][:, : self.blocks.queries] for j in range(self.count)]

    def seen(self, rows: slice, count: int) -> slice:
        return slice(rows.start, count - self.blocks.size + rows.stop)

    def hide(self, scores: Tensor, rows: slice, keys: slice, groups: slice) -> None:
        b = self.blocks
        _hide_after(scores, (1 if b.causal else 2) * b.size)
        _hide_before(scores)
        if b.front and groups.start == 0 and keys.start < b.size:
            scores[:, 0, :, : b.size - keys.start] = MASKED


class Column(Part):
    """The places at a multiple of the block's size from the query, but those less than a gap away."""

    def queries(self, x: Tensor) -> Tensor:
        return super().queries(x).transpose(1, 2)

    def keys(self, x: Tensor) -> Tensor:
        b, blocks = self.blocks, x.unflatten(1, (-1, self.blocks.size))
        return blocks[:, b.front :][:, : b.skipped + b.queries].transpose(1, 2)

    def seen(self, rows: slice, count: int) -> slice:
        return slice(0, max(1, self.blocks.skipped + rows.stop - self.blocks.gap) if self.blocks.causal else count)

    def hide(self, scores: Tensor, rows: slice, keys: slice, groups: slice) -> None:
        own = self.blocks.skipped + rows.start  # of the first row
        if self.blocks.causal:
            _hide_after(scores, own - self.blocks.gap)
        elif self.blocks.gap:
            near = scores.new_full(scores.shape[-2:], MASKED)
            scores += near.triu_(own - self.blocks.gap + 1).tril_(own + self.blocks.gap - 1)


class Summaries(Part):
    """The summaries of all blocks, `summary` places each.

    That of a query's own block is seen only if `first` is its place in the block.
    """

    def __init__(self, blocks: Blocks):
        super().__init__(blocks)
        self.summary, self.first, self.own = blocks.summary, blocks.first, blocks.first >= 0

    def queries(self, x: Tensor) -> Tensor:
        return x.unsqueeze(1)

    def keys(self, x: Tensor) -> Tensor:
        return x.unsqueeze(1)

    def _before(self, row: int) -> int:
        """The number of summaries before the row's block."""
        return self.summary * (self.blocks.skipped + row // self.blocks.size)

    def seen(self, rows: slice, count: int) -> slice:
        last = self._before(rows.stop - 1) + (self.summary if self.own else 0)
        return slice(0, max(1, min(count, last)) if self.blocks.causal else count)

    def hide(self, scores: Tensor, rows: slice, keys: slice, groups: slice) -> None:
        b, first = self.blocks, self._before(rows.start)
        if first >= scores.size(-1) or (self.own and not b.causal):
            return
        part = scores[..., first : self._before(rows.stop - 1) + self.summary]  # of blocks that have some of these rows
        key = torch.arange(first, first + part.size(-1), device=scores.device)
        row = torch.arange(rows.start, rows.stop, device=scores.device).unsqueeze(1)
        block = torch.div(key, self.summary, rounding_mode="floor") - b.skipped
        if not b.causal:
            hidden = block == torch.div(row, b.size, rounding_mode="floor")
        else:
            hidden = block * b.size + (self.first + key % self.summary if self.own else b.size) > row
        part += hidden * MASKED


# Adding a float mask is eight times as fast on the CPU as masked_fill_ with a bool one.


def _hide_after(scores: Tensor, last: int) -> None:
    """Hides keys after `last` from the first row, after last + 1 from the second, and so on."""
    first = max(0, last + 1)
    part = scores[..., first:]
    part += part.new_full(part.shape[-2:], MASKED).triu_(last + 1 - first)


def _hide_before(scores: Tensor) -> None:
    """Hides keys before 1 from the second row, before 2 from the third, and so on."""
    part = scores[..., : scores.size(-2)]
    part += part.new_full(part.shape[-2:], MASKED).tril_(-1)


# ------------------------------------------------------------------------------------------- attention


KINDS = (Block, Band, Column, Summaries)


class Source(NamedTuple):
    part: Part
    number: int  # of the keys that it reads

    def encode(self) -> List[int]:
        """Everything about it as an operator of torch takes it."""
        return [KINDS.index(type(self.part)), self.number, *map(int, self.part.blocks)]


def _decode(code: List[int]) -> List[Source]:
    sources = []
    for start in range(0, len(code), 10):
        kind, number, *blocks = code[start : start + 10]
        sources.append(Source(KINDS[kind](Blocks(*blocks)), number))
    return sources


def attend_parts(q: Tensor, keys: Sequence[Keys], sources: Sequence[Source], dropout: float = 0.0) -> Tensor:
    """Attention of q (N, n, z) to the keys of all parts under one softmax, to base 2, since torch's exp2 is several
    times as fast as exp: q is already divided by sqrt(z) log(2). A query that sees no key gives 0: (N, n, e).
    """
    keep, scale = [], 1.0
    for part, number in sources:
        shape = (*part.queries(q).shape[:3], part.keys(keys[number].k).size(2))
        mask, scale = keep_mask(shape, dropout, q.device)
        keep += [] if mask is None else [mask]
    padding = [each.padding for each in keys if each.padding is not None]  # of all keys or of none
    code = [number for source in sources for number in source.encode()]
    return _sparse_attention(q, [each.k for each in keys], [each.v for each in keys], padding, keep, code, scale)[0]


class _Tile(NamedTuple):
    sequences: slice
    groups: slice
    rows: slice
    keys: slice


class _Views:
    """The groups of a part, and its tiles."""

    def __init__(self, part: Part, q: Tensor, keys: Keys, keep: Optional[Tensor]):
        self.part, self.keep = part, keep
        self.q, self.k, self.v = part.queries(q), part.keys(keys.k), part.keys(keys.v)
        self.padding = None if keys.padding is None else part.keys(keys.padding)

    def tiles(self) -> Iterator[_Tile]:
        sequences, groups, queries = self.q.shape[:3]
        keys, limit = self.k.size(2), TILE_SCORES if self.q.device.type == "cpu" else TILE_SCORES_GPU
        rows = min(queries, max(1, limit // keys), ROWS)
        for start in range(0, queries, rows):
            row = slice(start, min(start + rows, queries))
            seen = self.part.seen(row, keys)
            together = max(1, limit // ((seen.stop - seen.start) * rows))
            step, within = max(1, together // groups), min(groups, together)
            for s in range(0, sequences, step):
                for g in range(0, groups, within):
                    last = min(s + step, sequences), min(g + within, groups)
                    yield _Tile(slice(s, last[0]), slice(g, last[1]), row, seen)

    def scores(self, q: Tensor, k: Tensor, tile: _Tile) -> Tensor:
        """q (N' I', R', z), k (N' I', M', z) -> (N' I', R', M'), in float32 or better."""
        scores = torch.bmm(q, k.transpose(1, 2)).to(at_least_float32(q.dtype))
        each = scores.unflatten(0, (-1, tile.groups.stop - tile.groups.start))
        self.part.hide(each, tile.rows, tile.keys, tile.groups)
        if self.padding is not None:
            each.masked_fill_(of_keys(self.padding, tile).view(*each.shape[:2], 1, -1), MASKED)
        return scores

    def drop(self, weights: Tensor, tile: _Tile, scale: float) -> Tensor:
        """The weights after dropout, in place."""
        return weights if self.keep is None else weights.mul_(self.keep[tile].flatten(0, 1)).mul_(scale)


def of_rows(x: Tensor, tile: _Tile) -> Tensor:
    """(N, I, R, w) -> (N' I', R', w)."""
    return x[tile[:3]].flatten(0, 1)


def of_keys(x: Tensor, tile: _Tile) -> Tensor:
    """(N, I, M, w) -> (N' I', M', w)."""
    return x[tile[:2]][:, :, tile.keys].flatten(0, 1)


def add_to_keys(views: List[Tensor], tile: _Tile, grad: Tensor) -> None:
    """The transpose of `of_keys`, for views of `Part.apart`."""
    grad, first = grad.unflatten(0, (-1, tile.groups.stop - tile.groups.start)), 0
    for x in views:
        last = first + x.size(2)
        start, stop = max(first, tile.keys.start), min(last, tile.keys.stop)
        if start < stop:
            own = grad[:, :, start - tile.keys.start : stop - tile.keys.start]
            x[tile[:2]][:, :, start - first : stop - first] += own
        first = last


def _forward(
    q: Tensor,
    k: List[Tensor],
    v: List[Tensor],
    padding: List[Tensor],
    keep: List[Tensor],
    code: List[int],
    scale: float,
) -> Tuple[Tensor, Tensor, Tensor]:
    """The result, and for each query its highest score and the sum of 2^(score - highest)."""
    sources, keys = _decode(code), _keys(k, v, padding)
    dtype = at_least_float32(q.dtype)
    out = q.new_empty(*q.shape[:2], keys[0].v.size(2), dtype=dtype)
    top = q.new_empty(*q.shape[:2], 1, dtype=dtype)  # the highest score of a query
    total = torch.empty_like(top)  # the sum of 2^(score - top)
    for place, ((part, number), kept) in enumerate(zip(sources, keep or repeat(None))):
        views = _Views(part, q, keys[number], kept)
        outs, tops, totals = (part.queries(t) for t in (out, top, total))
        for tile in views.tiles():
            weights = views.scores(of_rows(views.q, tile), of_keys(views.k, tile), tile)
            highest = weights.amax(-1, keepdim=True)
            sums = weights.sub_(highest).exp2_().sum(-1, keepdim=True)
            v = of_keys(views.v, tile)
            y = torch.bmm(views.drop(weights, tile, scale).to(v.dtype), v).to(dtype)
            own_out, own_top, own_total = (t[tile[:3]] for t in (outs, tops, totals))
            y, sums, highest = y.view(own_out.shape), sums.view(own_top.shape), highest.view(own_top.shape)
            if place == 0:
                own_out.copy_(y)
                own_total.copy_(sums)
                own_top.copy_(highest)
                continue
            joined = torch.maximum(own_top, highest)
            before, more = torch.exp2(own_top - joined), torch.exp2(highest - joined)
            own_out.mul_(before).add_(y.mul_(more))
            own_total.mul_(before).add_(sums.mul_(more))
            own_top.copy_(joined)
    blind = top < MASKED / 2
    out = out.div_(total).masked_fill_(blind, 0.0).to(q.dtype)
    top.masked_fill_(blind, float("inf"))  # 2^(score - top) is 0 for every score
    return out, top, total


def _fake(q: Tensor, k: List[Tensor], v: List[Tensor], *_: Any) -> Tuple[Tensor, Tensor, Tensor]:
    top = q.new_empty(*q.shape[:2], 1, dtype=at_least_float32(q.dtype))
    return q.new_empty(*q.shape[:2], v[0].size(2)), top, torch.empty_like(top)


def _backward(grads, saved, q, k, v, padding, keep, code, scale) -> List[Tensor]:
    (out, top, total), sources, keys = saved, _decode(code), _keys(k, v, padding)
    dtype, dout = total.dtype, (grads[0] / total).to(q.dtype)  # in place of dividing the weights
    dq = torch.empty_like(q, dtype=dtype)
    grads = [Keys(*(torch.zeros_like(t, dtype=dtype) for t in each[:2])) for each in keys]
    mean = (dout.to(dtype) * out.to(dtype)).sum(-1, keepdim=True)  # of each row's gradients of weights
    for place, ((part, number), kept) in enumerate(zip(sources, keep or repeat(None))):
        views = _Views(part, q, keys[number], kept)
        douts, tops, means, dqs = (part.queries(t) for t in (dout, top, mean, dq))
        dk, dv = (part.apart(t) for t in grads[number][:2])
        for tile in views.tiles():
            own_q, k = of_rows(views.q, tile), of_keys(views.k, tile)
            weights = views.scores(own_q, k, tile).sub_(of_rows(tops, tile)).exp2_()
            own_dout, v = of_rows(douts, tile), of_keys(views.v, tile)
            dscores = views.drop(torch.bmm(own_dout, v.transpose(1, 2)).to(dtype), tile, scale)
            dscores = dscores.sub_(of_rows(means, tile)).mul_(weights).to(q.dtype)
            weights = views.drop(weights, tile, scale).to(q.dtype)
            add_to_keys(dv, tile, torch.bmm(weights.transpose(1, 2), own_dout))
            own_dq = dqs[tile[:3]]
            more = torch.bmm(dscores, k).view(own_dq.shape)
            own_dq.copy_(more) if place == 0 else own_dq.add_(more)
            add_to_keys(dk, tile, torch.bmm(dscores.transpose(1, 2), own_q))
    for t in (dq, *(each.k for each in grads)):
        t.mul_(LOG_2)
    return [dq.to(q.dtype), *(each.k.to(q.dtype) for each in grads), *(each.v.to(q.dtype) for each in grads)]


# Autograd would keep the weights of all tiles, n x M numbers for each part.
_sparse_attention = operator(
    "sparse_attention",
    "Tensor q, Tensor[] k, Tensor[] v, Tensor[] padding, Tensor[] keep, int[] code, float scale",
    "(Tensor, Tensor, Tensor)",
    _forward,
    _fake,
    _backward,
    saved=slice(3),
)


def _keys(k: List[Tensor], v: List[Tensor], padding: List[Tensor]) -> List[Keys]:
    return [Keys(*each) for each in zip(k, v, padding or repeat(None))]
