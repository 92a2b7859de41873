"""Attention between texts of several lines: the bias of a query and a key depends on the lines that they are in.

A place is the number of a token's line, its segment, and the token's offset in it. Query i and key j have the score

    q_i k_j / tau + b[o_j - o_i] + d[s_j - s_i],    visible if |s_j - s_i| <= window

for segments s and offsets o. d has a number for each distance of segments from -NEAR to NEAR; larger ones have that of
the nearest. Distances outside the table of b have its first or last number.
"""

from functools import partial
from itertools import repeat
from typing import Iterable, NamedTuple, Optional

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mega_fairseq.ops.attention.scores import weigh, weighted_sum
from mega_fairseq.ops.attention.tiles import tile_sizes
from mega_fairseq.ops.dropout import keep_mask
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
    wide, rows, together = at_least_float32(q.dtype), *tile_sizes(q, k.size(1))

    def attended(q, k, v, queries, keys, padding, keep, table) -> Tensor:
        scores = torch.bmm(q, k.to(q.dtype).transpose(1, 2)).to(wide)
        places, biases = Segments(queries, keys), bias._replace(table=table)
        weights = segment_weights(scores, places, biases, function, padding, scale)
        return weighted_sum(weights if keep is None else weights * keep * keep_scale, v.to(q.dtype))

    # Autograd would keep the weights of all tiles, n x m numbers for each group: they are computed again.
    of_tile = partial(checkpoint, attended, use_reentrant=False, preserve_rng_state=False)
    with without_autocast(q):
        q = q.to(product_dtype(q, dtype)) * scale
        tensors = (q, k.to(wide), v.to(wide), *segments, key_padding, keep)  # gradients of k and v are sums over tiles
        outputs = []
        for q, k, v, queries, keys, padding, keep in zip(*(_split(t, together, 0) for t in tensors)):
            tiles = zip(_split(q, rows, 1), _split(queries, rows, 1), _split(keep, rows, 1))
            outputs.append(
                torch.cat([of_tile(x, k, v, at, keys, padding, kept, bias.table) for x, at, kept in tiles], 1)
            )
        return torch.cat(outputs).to(dtype)


def _split(x: Optional[Tensor], size: int, dim: int) -> Iterable[Optional[Tensor]]:
    return repeat(None) if x is None else x.split(size, dim)
