"""Attention between texts of several lines: the bias of a query and a key depends on the lines that they are in.

A place is the number of a token's line, its segment, and the token's offset in it. Query i and key j have the score

    q_i k_j / tau + b[o_j - o_i] + d[s_j - s_i],    visible if |s_j - s_i| <= window

for segments s and offsets o. d has a number for each distance of segments from -NEAR to NEAR; larger ones have that of
the nearest. Distances outside the table of b have its first or last number.
"""

from itertools import product
from typing import Any, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor

from mega_fairseq.ops.attention.scores import weigh, weighted_sum
from mega_fairseq.ops.attention.tiles import tile_sizes
from mega_fairseq.ops.dropout import keep_mask
from mega_fairseq.ops.operators import differentiable, operator
from mega_fairseq.ops.precision import at_least_float32, cast_dtype, product_dtype, without_autocast

NEAR = 2


class Segments(NamedTuple):
    """The places (., ., 2) int32 of targets and sources, of which each has R / S consecutive targets."""

    queries: Tensor  # (R, n, 2)
    keys: Tensor  # (S, m, 2)

    def last(self) -> "Segments":
        return self._replace(queries=self.queries[:, -1:])

    def select(self, rows: Tensor, sources: Optional[Tensor]) -> "Segments":
        """Reorders the targets and, unless `sources` is None, the sources."""
        keys = self.keys if sources is None else self.keys.index_select(0, sources)
        return Segments(self.queries.index_select(0, rows), keys)


class Bias(NamedTuple):
    """The sums of b and d."""

    table: Tensor  # (2 NEAR + 1, D), in float32 or better
    first: int  # the distance of offsets in column 0
    window: Optional[int]  # None for all keys


def places(starts: Tensor, real: Tensor, before: Tensor, within: bool) -> Tensor:
    """The places (B, n, 2) of tokens after `before` (B, 2), the place of each row's last token.

    `starts` and `real` (B, n) are bool: whether a segment starts with a token, and whether it is no pad. Pads have the
    place of the token before them. Offsets are in the segment or, unless `within`, in the whole text.
    """
    segment = before[:, :1] + starts.cumsum(1, dtype=torch.int32)
    offset = before[:, 1:] + real.cumsum(1, dtype=torch.int32)
    if within:
        offset = offset - (offset * starts).cummax(1).values
    return torch.stack([segment, offset], -1)


def segment_weights(
    scores: Tensor, segments: Segments, bias: Bias, function: str, padding: Optional[Tensor], scale: float
) -> Tensor:
    """The weights of scores q k^T `scale` (G, n, m), in their dtype, at places (G, n, 2) and (G, m, 2)."""
    queries, keys = (places.unsqueeze(dim).unbind(-1) for places, dim in zip(segments, (2, 1)))
    distances, (rows, width) = keys[0] - queries[0], bias.table.shape  # (G, n, m)
    index = (keys[1] - queries[1] - bias.first).clamp_(0, width - 1)
    index.add_((distances + NEAR).clamp_(0, rows - 1), alpha=width)
    biases = bias.table.flatten().index_select(0, index.flatten()).view_as(scores)
    hidden = None if padding is None else padding.unsqueeze(1)
    if bias.window is not None:
        far = distances.abs() > bias.window
        hidden = far if hidden is None else far | hidden
    return weigh(scores, function, hidden, biases, None, False, scale)


def attention_in_segments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Segments,
    bias: Bias,
    function: str,
    key_padding: Optional[Tensor] = None,
    dropout: float = 0.0,
) -> Tensor:
    """q (G, n, z), k (G, m, z), v (G, m, e) at these places -> (G, n, e); a query that sees no key gives zeros."""
    dtype, scale = cast_dtype(q), q.size(-1) ** -0.5
    keep, keep_scale = keep_mask((q.size(0), q.size(1), k.size(1)), dropout, q.device)
    with without_autocast(q):
        q, k, v = (t.to(product_dtype(q, dtype)) for t in (q, k, v))
        rest = (*segments, key_padding, keep, keep_scale, bias.first, bias.window, function, scale)
        return _attention(v, q * scale, k, bias.table, *rest).to(dtype)


class _Inputs(NamedTuple):
    v: Tensor
    q: Tensor  # multiplied by `scale`
    k: Tensor
    table: Tensor
    queries: Tensor
    keys: Tensor
    padding: Optional[Tensor]
    keep: Optional[Tensor]  # (G, n, m) bool
    keep_scale: float
    first: int
    window: Optional[int]
    function: str
    scale: float

    def tiles(self) -> Iterator[Tuple[slice, slice, "_Inputs"]]:
        """The groups and rows of each tile, and its inputs."""
        size, together = tile_sizes(self.q, self.k.size(1))
        for g, r in product(range(0, self.q.size(0), together), range(0, self.q.size(1), size)):
            groups, rows = slice(g, g + together), slice(r, r + size)
            padding = None if self.padding is None else self.padding[groups]
            keep = None if self.keep is None else self.keep[groups, rows]
            of_groups = {"v": self.v[groups], "k": self.k[groups], "keys": self.keys[groups]}
            of_rows = {"q": self.q[groups, rows], "queries": self.queries[groups, rows]}
            yield groups, rows, self._replace(**of_groups, **of_rows, padding=padding, keep=keep)

    def attended(self) -> Tensor:
        """The definition."""
        scores = torch.bmm(self.q, self.k.transpose(1, 2)).to(at_least_float32(self.q.dtype))
        segments, bias = Segments(self.queries, self.keys), Bias(self.table, self.first, self.window)
        weights = segment_weights(scores, segments, bias, self.function, self.padding, self.scale)
        return weighted_sum(weights if self.keep is None else weights * self.keep * self.keep_scale, self.v)


def _forward(*args: Any) -> Tensor:
    x, out = _Inputs(*args), _fake(*args)
    for groups, rows, tile in x.tiles():
        out[groups, rows] = tile.attended()
    return out


def _fake(v: Tensor, q: Tensor, *_: Any) -> Tensor:
    return v.new_empty(q.size(0), q.size(1), v.size(2))


def _backward(grads: Sequence[Tensor], _: Any, *args: Any) -> List[Tensor]:
    totals = [torch.zeros_like(t, dtype=at_least_float32(t.dtype)) for t in args[:4]]
    for groups, rows, tile in _Inputs(*args).tiles():
        with differentiable():
            leaves = [t.detach().requires_grad_() for t in tile[:4]]
            parts = torch.autograd.grad(_Inputs(*leaves, *tile[4:]).attended(), leaves, grads[0][groups, rows])
        dv, dq, dk, dtable = totals
        for total, part in zip((dv[groups], dq[groups, rows], dk[groups], dtable), parts):
            total.add_(part)
    return [total.to(t.dtype) for total, t in zip(totals, args)]


# Autograd would keep the weights of all tiles, n x m numbers for each group.
_attention = operator(
    "attention_in_segments(Tensor v, Tensor q, Tensor k, Tensor table, Tensor queries, Tensor keys, Tensor? padding, "
    "Tensor? keep, float keep_scale, int first, int? window, str function, float scale) -> Tensor",
    _forward,
    _fake,
    _backward,
    gradients=4,
)
