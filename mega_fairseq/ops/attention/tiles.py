"""Attention in tiles of rows and groups that fit into the cache: `tiled_attention`.

Backward recomputes a tile's scores, so that nothing of size n x m outlives its tile but the bool mask of dropout. For
half-precision inputs, products are in half precision and everything else is in float32: scores, weights, their
gradients, and sums over tiles. Kernels on GPUs compute in float32, too, but store weights and their gradients in half
precision where it cannot overflow.

The gradients are by hand. Torch's own derivatives of a tile need more temporaries, and two passes more for relu^2 and
erf: forward and backward take 0 to 8% longer on the CPU at D 512 (z 128, e 1024), 4 to 19% at D 128 (z 32, e 256).
"""

from typing import Any, Iterator, List, Optional, Sequence, Tuple

import torch
from torch import Tensor

from mega_fairseq.ops.attention import tile_weights
from mega_fairseq.ops.attention.scores import multiply, row_factors
from mega_fairseq.ops.attention.tile_weights import Inputs, Tile
from mega_fairseq.ops.backend import Forms, on_cpu
from mega_fairseq.ops.operators import operator
from mega_fairseq.ops.precision import at_least_float32

TILE_SCORES = 1 << 19  # scores in a tile: 2 MiB of float32, which stays in a core's share of the cache
TILE_SCORES_GPU = 1 << 26  # 256 MiB of float32
# Rows of a tile at most. With few, a causal tile computes few scores of the future, but each tile has its launches.
TILE_ROWS, TILE_ROWS_GPU = 256, 2048

# The weights of a tile and their gradients.
FORMS = Forms(tile_weights, triton="mega_fairseq.ops.attention.tile_kernels")


def _forward(*args: Any) -> Tensor:
    x, out = Inputs(*args), _fake(*args)
    form = FORMS.of(x.q)
    for tile in _tiles(x):
        weights = form.weights(x, tile, _scores(x, tile), _keys_seen(x, tile))
        multiply(weights, x.v[tile.groups, tile.keys], out[tile.groups, tile.rows])
    return out


def _fake(v: Tensor, q: Tensor, *_: Any) -> Tensor:
    return v.new_empty(q.size(0), q.size(1), v.size(2))


def _backward(grads: Sequence[Tensor], _: Any, *args: Any) -> List[Tensor]:
    (dout,), x = grads, Inputs(*args)
    form, dq = FORMS.of(x.q), torch.empty_like(x.q)
    several = tile_sizes(x.q, x.k.size(1))[0] < x.q.size(1)  # then tiles of rows are added up
    dv, dk = (torch.empty_like(t, dtype=at_least_float32(t.dtype) if several else t.dtype) for t in (x.v, x.k))
    dbias, dmultiplier = (
        None if t is None else torch.zeros_like(t, dtype=at_least_float32(t.dtype)) for t in (x.bias, x.multiplier)
    )
    for tile in _tiles(x):
        groups, rows, keys = tile[:3]
        # The first tile of a group covers every key, so it initialises the sums of dk and dv.
        add, seen = rows.stop < x.q.size(1), _keys_seen(x, tile)
        grad = torch.bmm(dout[groups, rows], x.v[groups, keys].transpose(1, 2))
        weights, dscores, products = form.gradients(x, tile, _scores(x, tile), grad, seen)
        multiply(weights.transpose(1, 2), dout[groups, rows], dv[groups, keys], add)
        if x.multiplier is not None:
            tile.add_to_vectors(dmultiplier, products)
        if x.bias is not None:
            tile.add_to_vectors(dbias, dscores)
        if seen is not None:
            before, _ = row_factors(x.function, x.outer, x.scale, seen)
            dscores = dscores if before is None else dscores.mul_(before)
        multiply(dscores, x.k[groups, keys], dq[groups, rows], scale=x.scale)
        multiply(dscores.transpose(1, 2), x.q[groups, rows], dk[groups, keys], add, x.scale)
    sums = dv, dq, dk, dbias, dmultiplier
    return [total.to(t.dtype) for total, t in zip(sums, args) if t is not None]


# Autograd would keep the weights of all tiles, n x m numbers for each group.
tiled_attention = operator(
    "tiled_attention(Tensor v, Tensor q, Tensor k, Tensor? bias, Tensor? multiplier, Tensor? key_padding, "
    "Tensor? keep, float keep_scale, str function, bool causal, bool outer, float scale) -> Tensor",
    _forward,
    _fake,
    _backward,
    gradients=5,
)


def tile_sizes(q: Tensor, keys: int) -> Tuple[int, int]:
    """The rows of a tile, and how many groups it has: each is a product of its own, with the same digits."""
    most, size = (TILE_ROWS, TILE_SCORES) if on_cpu(q) else (TILE_ROWS_GPU, TILE_SCORES_GPU)
    rows = min(q.size(1), max(1, size // keys), most)
    return rows, max(1, size // (rows * keys))


def _tiles(x: Inputs) -> Iterator[Tile]:
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
            yield Tile(slice(g, min(g + together, groups)), slice(start, stop), slice(0, reach), head, distances)


def _scores(x: Inputs, tile: Tile) -> Tensor:
    """q k^T `scale` (G', T, keys), in the dtype of q."""
    q, k = x.q[tile.groups, tile.rows], x.k[tile.groups, tile.keys].transpose(1, 2)
    return q.new_empty(*q.shape[:2], k.size(2)).baddbmm_(q, k, beta=0.0, alpha=x.scale)


def _keys_seen(x: Inputs, tile: Tile) -> Optional[Tensor]:
    """The number of keys that each row sees, at least 1: (T, 1), (G', T, 1) or (G', 1, 1); not for softmax."""
    if x.function == "softmax":
        return None
    (first, stop, _), reach, wide = tile.rows.indices(x.q.size(1)), tile.keys.stop, at_least_float32(x.q.dtype)
    count = stop - first
    if x.key_padding is not None:
        real = ~x.key_padding[tile.groups, None, tile.keys]
        seen = real.cumsum(-1)[..., reach - count :] if x.causal else real.sum(-1, keepdim=True)
        return seen.clamp_min(1).to(wide).transpose(1, 2)
    if x.causal:
        return torch.arange(reach - count + 1, reach + 1, dtype=wide, device=x.q.device).unsqueeze(-1)
    return torch.full((1, 1), reach, dtype=wide, device=x.q.device)
