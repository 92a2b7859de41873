"""Attention in tiles of rows and groups that fit into the cache: `tiled_attention`.

Backward recomputes a tile's scores, so that nothing of size n x m outlives its tile but the bool mask of dropout. For
half-precision inputs, products are in half precision and everything else is in float32: scores, weights, their
gradients, and sums over tiles.
"""

from typing import Any, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor

from mega_fairseq.ops.attention.scores import (
    MASKED,
    scaled_rows,
    weights_backward,
    weights_of,
)
from mega_fairseq.ops.diagonals import diagonal_sums, toeplitz_matrix
from mega_fairseq.ops.operators import operator
from mega_fairseq.ops.precision import at_least_float32

TILE_SCORES = 1 << 19  # scores in a tile: 2 MiB of float32, which stays in a core's share of the cache
TILE_SCORES_GPU = 1 << 26  # 256 MiB
# Rows of a tile at most. With few rows, a causal tile computes few scores of the future; each tile is some 30 launches.
TILE_ROWS, TILE_ROWS_GPU = 256, 1024


class _Tile(NamedTuple):
    groups: slice
    rows: slice
    keys: slice
    heads: slice  # of the vectors over distances; the number of groups in the tile is a multiple of theirs


class _Inputs(NamedTuple):
    """The tensors that a tile's weights depend on; optional ones as in `attention_naive`."""

    q: Tensor
    k: Tensor
    bias: Optional[Tensor]  # (H, n + m - 1)
    multiplier: Optional[Tensor]  # (H, n + m - 1)
    key_padding: Optional[Tensor]
    keep: Optional[Tensor]
    rest: Optional[Tensor]  # (G, n, 1)
    after: Optional[Tensor]  # (G, n, 1)


def _forward(v: Tensor, *args: Any) -> Tensor:
    *tensors, function, causal, scale = args
    inputs = _Inputs(*tensors)
    out = _fake(v, inputs.q)
    for tile in _tiles(inputs, causal):
        _, weights = _tile_weights(inputs, function, causal, tile)
        if inputs.multiplier is not None:
            _by_head(weights, tile).mul_(_matrices(inputs.multiplier, inputs, tile))
        if inputs.keep is not None:
            weights.mul_(inputs.keep[tile[:3]]).mul_(scale)
        _multiply(weights, v[tile.groups, tile.keys], out[tile.groups, tile.rows])
    return out


def _fake(v: Tensor, q: Tensor, *_: Any) -> Tensor:
    return v.new_empty(q.size(0), q.size(1), v.size(2))


def _backward(grads: Sequence[Tensor], _: Any, v: Tensor, *args: Any) -> List[Tensor]:
    (dout,), (*tensors, function, causal, scale) = grads, args
    inputs = _Inputs(*tensors)
    q, k, bias, multiplier, _, keep, rest, after = inputs
    dq = torch.empty_like(q)
    dk, dv = (torch.empty_like(t, dtype=at_least_float32(t.dtype)) for t in (k, v))  # sums over tiles
    dbias, dmultiplier = (
        None if t is None else torch.zeros_like(t, dtype=at_least_float32(t.dtype)) for t in (bias, multiplier)
    )
    for tile in _tiles(inputs, causal):
        groups, rows, keys, _ = tile
        # The first tile of a group covers every key, so it initialises the sums of dk and dv.
        first = rows.stop == q.size(1)
        scores, weights = _tile_weights(inputs, function, causal, tile)
        grad = torch.bmm(dout[groups, rows], v[groups, keys].transpose(1, 2)).to(scores.dtype)
        kept = weights
        if keep is not None:
            grad.mul_(keep[tile[:3]]).mul_(scale)
            kept = weights * keep[tile[:3]] * scale
        if multiplier is not None:
            factors = _matrices(multiplier, inputs, tile)
            kept = (_by_head(kept, tile) * factors).view_as(kept)
            _add_vectors(dmultiplier, _by_head(grad * weights, tile).sum(0), inputs, tile)
            _by_head(grad, tile).mul_(factors)
        _add_transposed(dv[groups, keys], kept, dout[groups, rows], first)
        dscores = weights_backward(grad, scores, weights, function)
        if after is not None:
            dscores.mul_(after[groups, rows])
        if bias is not None:
            _add_vectors(dbias, _by_head(dscores, tile).sum(0), inputs, tile)
        if rest is not None:
            dscores.mul_(rest[groups, rows])
        _multiply(dscores, k[groups, keys], dq[groups, rows])
        _add_transposed(dk[groups, keys], dscores, q[groups, rows], first)
    results = ((dv, v), (dq, q), (dk, k), (dbias, bias), (dmultiplier, multiplier))
    return [grad.to(t.dtype) for grad, t in results if t is not None]


# `attention_naive` in tiles, for q and `rest` of `scaled_queries`; bias and multiplier are (H, n + m - 1).
# Autograd would keep the weights of all tiles, n x m numbers for each group.
tiled_attention = operator(
    "tiled_attention",
    "Tensor v, Tensor q, Tensor k, Tensor? bias, Tensor? multiplier, Tensor? key_padding, Tensor? keep, "
    "Tensor? rest, Tensor? after, str function, bool causal, float scale",
    "Tensor",
    _forward,
    _fake,
    _backward,
    gradients=5,
)


def tile_size(x: Tensor) -> int:
    return TILE_SCORES if x.device.type == "cpu" else TILE_SCORES_GPU


def _tiles(inputs: _Inputs, causal: bool) -> Iterator[_Tile]:
    """Tiles that cover the scores, the last rows of a group first."""
    (groups, queries, _), keys = inputs.q.shape, inputs.k.size(1)
    heads = max(1 if t is None else t.size(0) for t in (inputs.bias, inputs.multiplier))
    most = TILE_ROWS if inputs.q.device.type == "cpu" else TILE_ROWS_GPU
    rows = min(queries, max(1, tile_size(inputs.q) // keys), most)
    together = max(
        1, tile_size(inputs.q) // (rows * keys)
    )  # groups: each is a product of its own, with the same digits
    if together >= heads:
        together -= together % heads
    else:
        together = max(count for count in range(1, together + 1) if heads % count == 0)
    for g in range(0, groups, together):
        head = slice(g % heads, g % heads + min(together, heads))
        for end in range(queries, 0, -rows):
            reach = keys - queries + end if causal else keys
            yield _Tile(slice(g, min(g + together, groups)), slice(max(0, end - rows), end), slice(0, reach), head)


def _tile_weights(inputs: _Inputs, function: str, causal: bool, tile: _Tile) -> Tuple[Tensor, Tensor]:
    """Scores and f(scores), (G', T, keys) each."""
    q, k, bias, _, key_padding, _, rest, after = inputs
    groups, rows, keys, _ = tile
    scores = torch.bmm(q[groups, rows], k[groups, keys].transpose(1, 2)).to(at_least_float32(q.dtype))
    if rest is not None:
        scores.mul_(rest[groups, rows])
    count = rows.stop - rows.start
    if bias is not None:
        _by_head(scores, tile).add_(_matrices(bias, inputs, tile))
    if after is not None:
        scores.mul_(after[groups, rows])
    if causal and count > 1:  # only the last `count` keys can be in a row's future
        future = torch.ones(count, count, dtype=torch.bool, device=q.device).triu_(1)
        scores[..., keys.stop - count :].masked_fill_(future, MASKED)
    if key_padding is not None:
        padding = key_padding[groups, None, keys]
        scores.masked_fill_(padding, MASKED)
    weights = weights_of(scores, function)
    if key_padding is not None:
        weights.masked_fill_(padding, 0.0)
        if causal and count > 1:  # a row that sees only pads has no weights
            weights[..., keys.stop - count :].masked_fill_(future, 0.0)
    return scores, weights


# --------------------------------------------------------------------------------------- vectors over distances


def _by_head(x: Tensor, tile: _Tile) -> Tensor:
    """(G', T, keys) -> (G' / H', H', T, keys)."""
    return x.view(-1, tile.heads.stop - tile.heads.start, *x.shape[1:])


def _distances(inputs: _Inputs, tile: _Tile) -> slice:
    """The part of n + m - 1 distances that occurs in a tile."""
    low = inputs.q.size(1) - tile.rows.stop
    return slice(low, low + tile.rows.stop - tile.rows.start + tile.keys.stop - 1)


def _matrices(vectors: Tensor, inputs: _Inputs, tile: _Tile) -> Tensor:
    """(H, n + m - 1) -> (H', T, keys)."""
    count = tile.rows.stop - tile.rows.start
    return toeplitz_matrix(vectors[tile.heads, _distances(inputs, tile)], count, tile.keys.stop)


def _add_vectors(target: Tensor, grad: Tensor, inputs: _Inputs, tile: _Tile) -> None:
    """The transpose of `_matrices`: grad (H', T, keys) into target (H, n + m - 1)."""
    target[tile.heads, _distances(inputs, tile)] += diagonal_sums(grad)


# --------------------------------------------------------------------------------------- products


def _multiply(a: Tensor, b: Tensor, out: Tensor) -> None:
    """a @ b in b's dtype."""
    rows, size = scaled_rows(a, b.dtype)
    if size is None:
        torch.bmm(rows, b, out=out)
    else:
        torch.mul(torch.bmm(rows, b), size, out=out)


def _add_transposed(target: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """a^T @ b in b's dtype, into target in float32 or better."""
    if target.dtype == b.dtype:
        if first:
            torch.bmm(a.transpose(1, 2), b, out=target)
        else:
            target.baddbmm_(a.transpose(1, 2), b)
        return
    rows, size = scaled_rows(a, b.dtype)
    largest = None
    if size is not None:  # b takes over the scale of a's rows, and is divided by its largest value to fit float16
        b = b * size
        largest = b.abs().amax((1, 2), keepdim=True).clamp_min_(torch.finfo(b.dtype).tiny)
        b = (b / largest).to(rows.dtype)
    product = torch.bmm(rows.transpose(1, 2), b).to(target.dtype)
    if largest is not None:
        product *= largest
    target.copy_(product) if first else target.add_(product)
