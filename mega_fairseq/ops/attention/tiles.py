"""Attention in tiles of rows and groups that fit into the cache: `tiled_attention`.

Backward recomputes a tile's scores, so that nothing of size n x m outlives its tile but the bool mask of dropout. For
half-precision inputs, products are in half precision and everything else is in float32: scores, weights, their
gradients, and sums over tiles.

The gradients are by hand. Torch's own derivatives of a tile need more temporaries, and two passes more for relu^2 and
erf: forward and backward take 0 to 8% longer on the CPU at D 512 (z 128, e 1024), 4 to 19% at D 128 (z 32, e 256).
"""

from typing import Any, Iterator, List, NamedTuple, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor

from mega_fairseq.ops.attention.scores import MASKED, Factor, multiply, row_factors, weights_backward, weights_of
from mega_fairseq.ops.diagonals import diagonal_sums, toeplitz_matrix
from mega_fairseq.ops.operators import operator
from mega_fairseq.ops.precision import at_least_float32

TILE_SCORES = 1 << 19  # scores in a tile: 2 MiB of float32, which stays in a core's share of the cache
TILE_SCORES_GPU = 1 << 26  # 256 MiB
# Rows of a tile at most. With few rows, a causal tile computes few scores of the future; each tile is some 30 launches.
TILE_ROWS, TILE_ROWS_GPU = 256, 1024


class _Inputs(NamedTuple):
    v: Tensor  # (G, m, e)
    q: Tensor  # (G, n, z), multiplied by `scale`
    k: Tensor  # (G, m, z)
    bias: Optional[Tensor]  # (H, n + m - 1)
    multiplier: Optional[Tensor]  # (H, n + m - 1)
    key_padding: Optional[Tensor]  # (G, m) bool
    keep: Optional[Tensor]  # (G, n, m) bool
    keep_scale: float
    function: str
    causal: bool
    outer: bool
    scale: float


class _Tile(NamedTuple):
    groups: slice
    rows: slice
    keys: slice
    heads: slice  # of the vectors over distances; the number of groups in the tile is a multiple of theirs
    distances: slice  # of the vectors over distances

    def by_head(self, x: Tensor) -> Tensor:
        """(G', T, keys) -> (G' / H', H', T, keys)."""
        return x.view(-1, self.heads.stop - self.heads.start, *x.shape[1:])

    def matrices(self, vectors: Tensor) -> Tensor:
        """(H, n + m - 1) -> (H', T, keys)."""
        return toeplitz_matrix(vectors[self.heads, self.distances], self.rows.stop - self.rows.start, self.keys.stop)

    def add_to_vectors(self, vectors: Tensor, grad: Tensor) -> None:
        """The transpose of `matrices`: adds grad (G', T, keys) to vectors (H, n + m - 1)."""
        vectors[self.heads, self.distances] += diagonal_sums(self.by_head(grad).sum(0))


def _forward(*args: Any) -> Tensor:
    x, out = _Inputs(*args), _fake(*args)
    for tile in _tiles(x):
        weights = _tile_weights(x, tile)[1]
        if x.multiplier is not None:
            tile.by_head(weights).mul_(tile.matrices(x.multiplier))
        if x.keep is not None:
            weights.mul_(x.keep[tile[:3]]).mul_(x.keep_scale)
        multiply(weights, x.v[tile.groups, tile.keys], out[tile.groups, tile.rows])
    return out


def _fake(v: Tensor, q: Tensor, *_: Any) -> Tensor:
    return v.new_empty(q.size(0), q.size(1), v.size(2))


def _backward(grads: Sequence[Tensor], _: Any, *args: Any) -> List[Tensor]:
    (dout,), x = grads, _Inputs(*args)
    dv, dq, dk = (torch.empty_like(t, dtype=at_least_float32(t.dtype)) for t in x[:3])  # sums over tiles
    dbias, dmultiplier = (
        None if t is None else torch.zeros_like(t, dtype=at_least_float32(t.dtype)) for t in (x.bias, x.multiplier)
    )
    for tile in _tiles(x):
        groups, rows, keys = tile[:3]
        # The first tile of a group covers every key, so it initialises the sums of dk and dv.
        add = rows.stop < x.q.size(1)
        scores, weights, before, after = _tile_weights(x, tile)
        grad = torch.bmm(dout[groups, rows], x.v[groups, keys].transpose(1, 2)).to(scores.dtype)
        kept = weights
        if x.keep is not None:
            grad.mul_(x.keep[tile[:3]]).mul_(x.keep_scale)
            kept = weights * x.keep[tile[:3]] * x.keep_scale
        if x.multiplier is not None:
            factors = tile.matrices(x.multiplier)
            kept = (tile.by_head(kept) * factors).view_as(kept)
            tile.add_to_vectors(dmultiplier, grad * weights)
            tile.by_head(grad).mul_(factors)
        multiply(kept.transpose(1, 2), dout[groups, rows], dv[groups, keys], add)
        dscores = weights_backward(grad, scores, weights, x.function)
        if after is not None:
            dscores.mul_(after)
        if x.bias is not None:
            tile.add_to_vectors(dbias, dscores)
        if before is not None:
            dscores.mul_(before)
        multiply(dscores, x.k[groups, keys], dq[groups, rows])
        multiply(dscores.transpose(1, 2), x.q[groups, rows], dk[groups, keys], add)
    sums = dv, dq, dk, dbias, dmultiplier
    return [total.to(t.dtype) for total, t in zip(sums, args) if t is not None]


# Autograd would keep the weights of all tiles, n x m numbers for each group.
tiled_attention = operator(
    "tiled_attention",
    "Tensor v, Tensor q, Tensor k, Tensor? bias, Tensor? multiplier, Tensor? key_padding, Tensor? keep, "
    "float keep_scale, str function, bool causal, bool outer, float scale",
    "Tensor",
    _forward,
    _fake,
    _backward,
    gradients=5,
)


def tile_sizes(q: Tensor, keys: int) -> Tuple[int, int]:
    """The rows of a tile, and how many groups it has: each is a product of its own, with the same digits."""
    most, size = (TILE_ROWS, TILE_SCORES) if q.device.type == "cpu" else (TILE_ROWS_GPU, TILE_SCORES_GPU)
    rows = min(q.size(1), max(1, size // keys), most)
    return rows, max(1, size // (rows * keys))


def _tiles(x: _Inputs) -> Iterator[_Tile]:
    """Tiles that cover the scores, the last rows of a group first."""
    (groups, queries, _), keys = x.q.shape, x.k.size(1)
    heads = next((t.size(0) for t in (x.bias, x.multiplier) if t is not None), 1)
    rows, together = tile_sizes(x.q, keys)
    if together >= heads:
        together -= together % heads
    else:
        together = max(count for count in range(1, together + 1) if heads % count == 0)
    for g in range(0, groups, together):
        head = slice(g % heads, g % heads + min(together, heads))
        for stop in range(queries, 0, -rows):
            start, reach = max(0, stop - rows), keys - queries + stop if x.causal else keys
            distances = slice(queries - stop, queries - start + reach - 1)
            yield _Tile(slice(g, min(g + together, groups)), slice(start, stop), slice(0, reach), head, distances)


def _tile_weights(x: _Inputs, tile: _Tile) -> Tuple[Tensor, Tensor, Factor, Factor]:
    """Scores and f(scores), (G', T, keys) each, and the factors of rows."""
    groups, rows, keys = tile[:3]
    scores = torch.bmm(x.q[groups, rows], x.k[groups, keys].transpose(1, 2)).to(at_least_float32(x.q.dtype))
    count, reach = scores.shape[1:]
    padding = None if x.key_padding is None else x.key_padding[groups, None, keys]
    before, after = None, None
    if x.function != "softmax":
        before, after = row_factors(x.function, x.outer, x.scale, _keys_seen(scores, x.causal, padding))
    if before is not None:
        scores.mul_(before)
    if x.bias is not None:
        tile.by_head(scores).add_(tile.matrices(x.bias))
    if after is not None:
        scores.mul_(after)
    future = None
    if x.causal and count > 1:  # only the last `count` keys can be in a row's future
        future = torch.ones(count, count, dtype=torch.bool, device=scores.device).triu_(1)

    def hide(t: Tensor, value: float) -> None:
        if future is not None:
            t[..., reach - count :].masked_fill_(future, value)
        if padding is not None:
            t.masked_fill_(padding, value)

    hide(scores, MASKED)
    weights = weights_of(scores, x.function)
    if padding is not None:  # a row that sees only pads has no weights
        hide(weights, 0.0)
    return scores, weights, before, after


def _keys_seen(scores: Tensor, causal: bool, padding: Optional[Tensor]) -> Union[int, Tensor]:
    """The number of keys that each row sees, at least 1: (T, 1), (G', T, 1) or (G', 1, 1), or one for all rows."""
    count, reach = scores.shape[1:]
    if padding is not None:
        seen = (~padding).cumsum(-1)[..., reach - count :] if causal else (~padding).sum(-1, keepdim=True)
        return seen.clamp_min(1).to(scores.dtype).transpose(1, 2)
    if causal:
        return torch.arange(reach - count + 1, reach + 1, dtype=scores.dtype, device=scores.device).unsqueeze(-1)
    return reach
