"""The weights of a tile and their gradients, between the products of `tiles.py`: in place, in float32 or better."""

from typing import NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from mega_fairseq.ops.attention.scores import MASKED, Factor, add_bias, by_head, weights_backward, weights_of
from mega_fairseq.ops.diagonals import diagonal_sums, toeplitz_matrix
from mega_fairseq.ops.precision import at_least_float32


class Inputs(NamedTuple):
    v: Tensor  # (G, m, e)
    q: Tensor  # (G, n, z)
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


class Tile(NamedTuple):
    groups: slice
    rows: slice
    keys: slice
    heads: slice  # of the vectors over distances; the number of groups in the tile is a multiple of theirs
    distances: slice  # of the vectors over distances

    def matrices(self, vectors: Tensor) -> Tensor:
        """(H, n + m - 1) -> (H', T, keys)."""
        return toeplitz_matrix(vectors[self.heads, self.distances], self.rows.stop - self.rows.start, self.keys.stop)

    def add_to_vectors(self, vectors: Tensor, grad: Tensor) -> None:
        """The transpose of `matrices`: adds grad (G', T, keys) to vectors (H, n + m - 1)."""
        sums = diagonal_sums(grad.unflatten(0, (-1, self.heads.stop - self.heads.start)).sum(0, dtype=vectors.dtype))
        vectors[self.heads, self.distances].add_(sums)


def weights(x: Inputs, tile: Tile, scores: Tensor, seen: Optional[Tensor]) -> Tensor:
    """The weights of scores (G', T, keys) with bias, multiplier and dropout; rows see `seen` keys."""
    _, out, _ = _before_factors(x, tile, scores, seen)
    if x.multiplier is not None:
        factors = tile.matrices(x.multiplier)
        by_head(out, factors).mul_(factors)
    if x.keep is not None:
        out.mul_(x.keep[tile[:3]]).mul_(x.keep_scale)
    return out


def gradients(
    x: Inputs, tile: Tile, scores: Tensor, grad: Tensor, seen: Optional[Tensor]
) -> Tuple[Tensor, Tensor, Optional[Tensor]]:
    """The weights again, and from their gradient that of biased scores and of the multiplier's matrix."""
    scores, weights, after = _before_factors(x, tile, scores, seen)
    grad, kept, products = grad.to(scores.dtype), weights, None
    if x.keep is not None:
        grad.mul_(x.keep[tile[:3]]).mul_(x.keep_scale)
        kept = weights * x.keep[tile[:3]] * x.keep_scale
    if x.multiplier is not None:
        factors = tile.matrices(x.multiplier)
        kept = (by_head(kept, factors) * factors).view_as(kept)
        products = grad * weights
        by_head(grad, factors).mul_(factors)
    dscores = weights_backward(grad, scores, weights, x.function)
    return kept, dscores if after is None else dscores.mul_(after), products


def _before_factors(x: Inputs, tile: Tile, scores: Tensor, seen: Optional[Tensor]) -> Tuple[Tensor, Tensor, Factor]:
    """Scores and f(scores), and the last factor of the scores' rows."""
    scores = scores.to(at_least_float32(scores.dtype))
    count, reach = scores.shape[1:]
    bias = None if x.bias is None else tile.matrices(x.bias)
    after = add_bias(scores, x.function, seen, bias, x.outer, x.scale)
    padding = None if x.key_padding is None else x.key_padding[tile.groups, None, tile.keys]
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
    return scores, weights, after
