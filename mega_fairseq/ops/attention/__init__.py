"""Attention O = f(Q K^T / tau + b) V with f one of softmax, relu2, laplace (paper, eq. 11 and 16-17).

Shapes: q (G, n, z), k (G, m, z), v (G, m, e) -> (G, n, e); z and e may differ. A group is a chunk of a sequence, or one
head of it. `causal` aligns the last query with the last key: query i sees keys 0 .. m - n + i.
`key_padding` (G, m) bool, True = pad. A row that sees no key gives zeros.

`bias` is b as a function of distance, (n + m - 1,): the score of query i and key j gains bias[j - i + n - 1]. With H
heads it is (H, n + m - 1), and group g belongs to head g % H: the heads of a sequence are consecutive, as after
(B, n, H, z) -> (B H, n, z). `multiplier`, of either shape, multiplies the weights after f and before dropout. Neither
is stored as a matrix, and their gradients are vectors too.

tau is sqrt(z) for softmax, else the number N of keys that a row sees. With `outer` (GAU), relu2 is
relu(q k / sqrt(z) + b)^2 / N: scores and bias are divided by sqrt(N), so that no number is larger than its result.

Four implementations of the same function:

    attention_naive   whole matrices and autograd: the definition
    one position      queries that see the same keys at the same distances, as in decoding: `weights_at_one_position`
    fused             torch's scaled_dot_product_attention, for softmax, if one of its fused kernels can run
    tiled             tiles of rows, recomputed in backward, so that nothing of size n x m outlives its tile but
                      the bool mask of dropout: for laplace, relu2, multipliers, large masks, softmax with z != e
                      (on GPUs in half precision, not if e is a multiple of z), and on GPUs every bias

The rule is in `fused_kernel_runs` and `_mask_fits`, and depends on shapes and the type of device only.
"""

from typing import Callable, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mega_fairseq.ops.attention.scores import (
    ATTENTION_FUNCTIONS,
    MASKED,
    laplace,
    one_over_tau,
    outer_factor,
    relu2,
    scaled_queries,
    visible_keys,
    weighted_sum,
    weights_of,
)
from mega_fairseq.ops.attention.tiles import TILE_SCORES, tiled_attention
from mega_fairseq.ops.diagonals import toeplitz_matrix
from mega_fairseq.ops.dropout import keep_mask
from mega_fairseq.ops.precision import (
    at_least_float32,
    cast_dtype,
    product_dtype,
    without_autocast,
)

__all__ = [
    "ATTENTION_FUNCTIONS",
    "attention",
    "attention_fused",
    "attention_naive",
    "attention_weights",
    "fused_kernel_runs",
    "laplace",
    "needs_mask",
    "relu2",
    "one_over_tau",
    "weighted_sum",
    "weights_at_one_position",
]

WIDEST = 256  # numbers per row in torch's flash kernels


def attention_naive(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    function: str,
    causal: bool = False,
    bias: Optional[Tensor] = None,
    key_padding: Optional[Tensor] = None,
    keep: Optional[Tensor] = None,
    scale: float = 1.0,
    multiplier: Optional[Tensor] = None,
    after: Optional[Tensor] = None,
) -> Tensor:
    """Attention by its definition, for q already divided by tau; `keep` (G, n, m) and `scale` are for dropout.

    `after` (G, n, 1) is the `outer_factor`.
    """
    weights = attention_weights(q, k, function, causal, bias, key_padding, multiplier, after)
    if keep is not None:
        weights = weights * keep * scale
    return torch.bmm(weights.to(v.dtype), v)


def attention_weights(
    q: Tensor,
    k: Tensor,
    function: str,
    causal: bool = False,
    bias: Optional[Tensor] = None,
    key_padding: Optional[Tensor] = None,
    multiplier: Optional[Tensor] = None,
    after: Optional[Tensor] = None,
) -> Tensor:
    """The weights of `attention_naive`, without dropout: (G, n, m), in float32 or better."""
    (_, queries, _), keys = q.shape, k.size(1)
    scores = torch.bmm(q, k.transpose(1, 2)).to(at_least_float32(q.dtype))
    if bias is not None:
        scores = _with_vectors(torch.add, scores, _by_index(bias, queries, keys))
    if after is not None:
        scores = scores * after
    visible = visible_keys(q, k, causal, key_padding)
    if visible is not None:
        scores = scores.masked_fill(~visible, MASKED)
    weights = weights_of(scores, function)
    if key_padding is not None:
        weights = weights.masked_fill(~visible, 0.0)  # a row without any key
    if multiplier is not None:
        weights = _with_vectors(torch.mul, weights, _by_index(multiplier, queries, keys))
    return weights


def _by_index(vectors: Tensor, queries: int, keys: int) -> Tensor:
    """`toeplitz_matrix` by its definition: (..., n + m - 1) -> (..., n, m)."""
    rows, columns = (torch.arange(size, device=vectors.device) for size in (queries, keys))
    return vectors[..., columns - rows.unsqueeze(1) + queries - 1]


def _with_vectors(operation: Callable[[Tensor, Tensor], Tensor], x: Tensor, per_head: Tensor) -> Tensor:
    """Combines x (G, n, m) with one matrix for all groups, (n, m), or with one per head, (H, n, m)."""
    if per_head.dim() < 3:
        return operation(x, per_head)
    return operation(x.unflatten(0, (-1, per_head.size(0))), per_head).flatten(0, 1)


def weights_at_one_position(
    q: Tensor,
    k: Tensor,
    function: str,
    bias: Optional[Tensor] = None,
    key_padding: Optional[Tensor] = None,
    multiplier: Optional[Tensor] = None,
    outer: bool = False,
) -> Tensor:
    """The weights of queries (G, n, z) that are all at one position, such as the beams of a sentence: (G, n, m).

    bias and multiplier, (m,) or (H, m), have one number per key. The weights are in float32 or better, for
    `weighted_sum`.
    """
    dtype = product_dtype(q.device.type, q.dtype)
    q, k = q.to(dtype), k.to(dtype)
    q, rest = scaled_queries(q, one_over_tau(q[:, :1], k, function, False, key_padding, outer))
    # For a few queries, the CPU's product is twice as fast in this order, tall times narrow.
    scores = torch.bmm(k, q.transpose(1, 2)).transpose(1, 2).to(at_least_float32(q.dtype))
    if rest is not None:
        scores = scores * rest
    if bias is not None:
        scores = _with_vectors(torch.add, scores, bias if bias.dim() == 1 else bias.unsqueeze(1))
    after = outer_factor(q, k, function, outer, False, key_padding)
    if after is not None:
        scores = scores * after
    if key_padding is None:
        weights = weights_of(scores, function)
    else:
        padding = key_padding.unsqueeze(1)
        weights = weights_of(scores.masked_fill(padding, MASKED), function).masked_fill(padding, 0.0)
    if multiplier is not None:
        weights = _with_vectors(torch.mul, weights, multiplier if multiplier.dim() == 1 else multiplier.unsqueeze(1))
    return weights


def fused_kernel_runs(
    q: Tensor, v: Tensor, function: str, columns: int = 0, dropout: float = 0.0, masked: bool = False
) -> bool:
    """Whether one of torch's fused kernels is suitable for these tensors: softmax, with q, k and v of the same width.

    On GPUs, flash kernels take one width, of at most WIDEST, and no mask. In half precision, where they are fast, the
    values of a group may be several times as wide, as in Mega: each part of them is a head, with the same queries and
    keys. This form has no dropout, which would differ between the parts. torch's kernel for other widths keeps its
    sums in the GPU's memory beyond 128 numbers per row: products of tiles are better. float64 has no fused kernel. On
    the CPU, the kernel has no dropout, and it sums gradients in half precision, which gives an error of 1% in bfloat16
    at 16,384 keys.
    """
    width, dtype = q.size(-1) + columns, cast_dtype(q)
    if function != "softmax":
        return False
    if q.device.type != "cpu":
        half = dtype in (torch.float16, torch.bfloat16)
        parts = half and not masked and dropout == 0.0 and v.size(-1) % width == 0
        fits = v.size(-1) == width or parts
        return width <= WIDEST and dtype != torch.float64 and fits
    if width != v.size(-1):
        return False
    in_float32 = product_dtype(q.device.type, dtype) == at_least_float32(dtype)
    return dropout == 0.0 and (in_float32 or not torch.is_grad_enabled())


def attention_fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    bias: Optional[Tensor] = None,
    key_padding: Optional[Tensor] = None,
    dropout: float = 0.0,
) -> Tensor:
    """Softmax attention by scaled_dot_product_attention, for q already divided by tau; a bias becomes a matrix.

    Values may be several times as wide as queries and keys, without a mask.
    """
    known = isinstance(q.size(1), int) and isinstance(k.size(1), int)  # and not a symbol of torch.export
    square = causal and known and q.size(1) == k.size(1) and bias is None and key_padding is None
    mask = None if square else visible_keys(q, k, causal, key_padding)
    if key_padding is not None:
        blind = ~mask.any(-1, keepdim=True)  # rows without any key see all keys here, and give zeros below
        mask = mask | blind
    heads = 1 if bias is None or bias.dim() == 1 else bias.size(0)
    if mask is not None and mask.dim() == 3:
        mask = mask.unflatten(0, (-1, heads))
    if bias is not None:
        matrix = toeplitz_matrix(bias.to(at_least_float32(bias.dtype)), q.size(1), k.size(1)).to(q.dtype)
        mask = matrix if mask is None else matrix.masked_fill(~mask, float("-inf"))
        mask = mask.unsqueeze(0) if mask.dim() == 3 else mask  # the CPU's kernel takes two or four dimensions
    if v.size(-1) > q.size(-1):  # each part of the values is a head
        parts = v.unflatten(-1, (-1, q.size(-1))).transpose(1, 2)  # (G, e / z, m, z)
        q, k = (t.unsqueeze(1).expand(-1, parts.size(1), -1, -1) for t in (q, k))
        out = F.scaled_dot_product_attention(q, k, parts, mask, dropout, square, scale=1.0)
        return out.transpose(1, 2).flatten(2)
    q, k, v = (t.unflatten(0, (-1, heads)) for t in (q, k, v))  # (G / H, H, n, z)
    out = F.scaled_dot_product_attention(q, k, v, mask, dropout, square, scale=1.0).flatten(0, 1)
    return out if key_padding is None else out.masked_fill(blind, 0.0)


def needs_mask(
    queries: int, keys: int, causal: bool, key_padding: Optional[Tensor], bias: Optional[Tensor] = None
) -> bool:
    """Whether the fused form needs a mask; for causality alone it does not."""
    return bias is not None or key_padding is not None or (causal and queries != keys)


def _is_learned_on_cpu(bias: Optional[Tensor]) -> bool:
    """Whether the bias gets a gradient: on the CPU, torch then keeps whole matrices for backward."""
    return bias is not None and bias.device.type == "cpu" and bias.requires_grad and torch.is_grad_enabled()


def _mask_fits(q: Tensor, k: Tensor, causal: bool, bias: Optional[Tensor], key_padding: Optional[Tensor]) -> bool:
    """Whether the float mask that the fused form needs for causality, padding and bias is at most as large as a tile.

    On GPUs it may only have one row for all queries of a group.
    """
    (groups, queries, _), keys = q.shape, k.size(1)
    differs = bias is not None or (causal and (queries != keys or key_padding is not None))  # between queries
    if q.device.type != "cpu":
        return not differs
    if not needs_mask(queries, keys, causal, key_padding, bias):
        return True
    matrices = groups if key_padding is not None else 1 if bias is None else bias.size(0)
    return matrices * (queries if differs else 1) * keys <= TILE_SCORES


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    function: str = "softmax",
    causal: bool = False,
    bias: Optional[Tensor] = None,
    columns: Optional[Tuple[Tensor, Tensor]] = None,
    key_padding: Optional[Tensor] = None,
    dropout: float = 0.0,
    multiplier: Optional[Tensor] = None,
    outer: bool = False,
) -> Tensor:
    """Attention in the fastest form for these inputs: q (G, n, z), k (G, m, z), v (G, m, e) -> (G, n, e).

    `columns` (n, r), (m, r) are extra columns of q and k: a bias that is an inner product of positions. Either may be
    one for each head, (H, n, r) or (H, m, r).
    """
    if function not in ATTENTION_FUNCTIONS:
        raise ValueError(f"function is {function!r}; choose one of {', '.join(ATTENTION_FUNCTIONS)}")
    dtype = cast_dtype(q)
    q, k, v = (t.to(product_dtype(q.device.type, dtype)) for t in (q, k, v))
    with without_autocast(q):
        if q.size(1) == 1 and columns is None and dropout == 0.0 and not torch.is_grad_enabled():
            return weighted_sum(weights_at_one_position(q, k, function, bias, key_padding, multiplier, outer), v).to(
                dtype
            )
        bias, multiplier = _with_heads(bias, multiplier)
        masked = needs_mask(q.size(1), k.size(1), causal, key_padding, bias)
        extra = 0 if columns is None else columns[0].size(-1)
        fused = fused_kernel_runs(q, v, function, extra, dropout, masked)
        if multiplier is not None or _is_learned_on_cpu(bias):
            fused = False
        if not _mask_fits(q, k, causal, bias, key_padding):
            fused = False
        factor = one_over_tau(q, k, function, causal, key_padding, outer)
        after = outer_factor(q, k, function, outer, causal, key_padding)
        q, rest = scaled_queries(q, factor, apart=not fused and columns is None)
        if columns is not None:
            q, k = (_with_columns(t, c) for t, c in zip((q, k), columns))
        if fused:
            return attention_fused(q, k, v, causal, bias, key_padding, dropout).to(dtype)
        keep, scale = keep_mask((q.size(0), q.size(1), k.size(1)), dropout, q.device)
        out = tiled_attention(v, q, k, bias, multiplier, key_padding, keep, rest, after, function, causal, scale)
        return out.to(dtype)


def _with_columns(x: Tensor, columns: Tensor) -> Tensor:
    """[x, columns] for x (G, n, z) and columns (n, r), or (H, n, r) with one for each head."""
    heads = 1 if columns.dim() == 2 else columns.size(0)
    x = x.unflatten(0, (-1, heads))
    return torch.cat([x, columns.to(x.dtype).expand(x.size(0), heads, -1, -1)], -1).flatten(0, 1)


def _with_heads(bias: Optional[Tensor], multiplier: Optional[Tensor]) -> Tuple[Optional[Tensor], Optional[Tensor]]:
    """Expands both to (H, n + m - 1), where H is the larger number of heads."""
    heads = max(1 if t is None or t.dim() == 1 else t.size(0) for t in (bias, multiplier))
    return tuple(None if t is None else t.expand(heads, -1) for t in (bias, multiplier))
