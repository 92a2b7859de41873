"""Attention O = f(Q K^T / tau + b) V with f one of softmax, relu2, laplace (paper, eq. 11 and 16-17).

Shapes: q (G, n, z), k (G, m, z), v (G, m, e) -> (G, n, e); z and e may differ. A group is a chunk of a sequence, or one
head of it. `causal` aligns the last query with the last key: query i sees keys 0 .. m - n + i.
`key_padding` (G, m) bool, True = pad. A row that sees no key gives zeros.

`bias` is b as a function of distance, (n + m - 1,): the score of query i and key j gains bias[j - i + n - 1]. With H
heads it is (H, n + m - 1), and group g belongs to head g % H: the heads of a sequence are consecutive, as after
(B, n, H, z) -> (B H, n, z). `multiplier`, of the same shape, multiplies the weights after f and before dropout. Neither
is stored as a matrix, and their gradients are vectors too.

tau is sqrt(z), or 1 / `scale`, for softmax, else the number N of keys that a row sees. With `outer` (GAU), relu2 is
relu(q k / sqrt(z) + b)^2 / N: scores and bias are divided by sqrt(N), so that no number is larger than its result.

Four implementations of the same function:

    naive.py          whole matrices and autograd: the definition
    one_position.py   queries that see the same keys at the same distances, as in decoding
    attention_fused   torch's scaled_dot_product_attention, for softmax, if one of its fused kernels can run
    tiles.py          tiles of rows, recomputed in backward, so that nothing of size n x m outlives its tile but
                      the bool mask of dropout: for laplace, relu2, multipliers, large masks, softmax with z != e, and
                      on GPUs every bias; weights by tile_weights.py, or on GPUs by tile_kernels.py

The rule is in `fused_kernel_runs`, and depends on shapes and the type of device only.
"""

from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from mega_fairseq.ops.attention.naive import visible_keys
from mega_fairseq.ops.attention.one_position import weights_at_one_position
from mega_fairseq.ops.attention.scores import ATTENTION_FUNCTIONS, weighted_sum
from mega_fairseq.ops.attention.tiles import TILE_SCORES, tiled_attention
from mega_fairseq.ops.backend import on_cpu
from mega_fairseq.ops.diagonals import toeplitz_matrix
from mega_fairseq.ops.dropout import keep_mask
from mega_fairseq.ops.precision import at_least_float32, cast_dtype, product_dtype, sums_in_half, without_autocast

WIDEST = 256  # numbers per row in torch's flash kernels


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    function: str = "softmax",
    causal: bool = False,
    bias: Optional[Tensor] = None,
    key_padding: Optional[Tensor] = None,
    dropout: float = 0.0,
    multiplier: Optional[Tensor] = None,
    outer: bool = False,
    scale: Optional[float] = None,
) -> Tensor:
    """Attention in the fastest form for these inputs: q (G, n, z), k (G, m, z), v (G, m, e) -> (G, n, e)."""
    if function not in ATTENTION_FUNCTIONS:
        raise ValueError(f"function is {function!r}; choose one of {', '.join(ATTENTION_FUNCTIONS)}")
    dtype, scale = cast_dtype(q), q.size(-1) ** -0.5 if scale is None else scale
    q, k, v = (t.to(product_dtype(q, dtype)) for t in (q, k, v))
    softmax = function == "softmax" and multiplier is None
    with without_autocast(q):
        if q.size(1) == 1 and dropout == 0.0 and not torch.is_grad_enabled():
            weights = weights_at_one_position(q, k, function, bias, key_padding, multiplier, outer, scale)
            return weighted_sum(weights, v).to(dtype)
        bias, multiplier = (None if t is None else torch.atleast_2d(t) for t in (bias, multiplier))
        if softmax and fused_kernel_runs(q, k, v, causal, bias, key_padding, dropout):
            return attention_fused(q, k, v, causal, bias, key_padding, dropout, scale).to(dtype)
        keep, keep_scale = keep_mask((q.size(0), q.size(1), k.size(1)), dropout, q.device)
        return tiled_attention(
            v, q, k, bias, multiplier, key_padding, keep, keep_scale, function, causal, outer, scale
        ).to(dtype)


def fused_kernel_runs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    bias: Optional[Tensor],
    key_padding: Optional[Tensor],
    dropout: float,
) -> bool:
    """Whether one of torch's fused kernels is suitable for softmax with these tensors.

    On GPUs, flash kernels take one width, of at most WIDEST, and no mask but one row for all queries of a group.
    torch's kernel for other widths keeps its sums in the GPU's memory beyond 128 numbers per row: products of tiles are
    better. float64 has no fused kernel.

    On the CPU, the kernel has no dropout, and it sums gradients in half precision, which gives an error of 1% in
    bfloat16 at 16,384 keys. Its float mask for causality, padding and bias may be as large as a tile, without
    gradients, for which torch would keep whole matrices.
    """
    (groups, queries, width), keys = q.shape, k.size(1)
    differs = bias is not None or (causal and (queries != keys or key_padding is not None))  # between queries
    if not on_cpu(q):
        return v.size(-1) == width <= WIDEST and q.dtype != torch.float64 and not differs
    if v.size(-1) != width or dropout or sums_in_half(q):
        return False
    if bias is not None and bias.requires_grad and torch.is_grad_enabled():
        return False
    matrices = groups if key_padding is not None else 1 if bias is None else bias.size(0)
    return not (differs or key_padding is not None) or matrices * (queries if differs else 1) * keys <= TILE_SCORES


def attention_fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    bias: Optional[Tensor] = None,
    key_padding: Optional[Tensor] = None,
    dropout: float = 0.0,
    scale: Optional[float] = None,
) -> Tensor:
    """Softmax attention by scaled_dot_product_attention; a bias becomes a matrix."""
    known = isinstance(q.size(1), int) and isinstance(k.size(1), int)  # and not a symbol of torch.export
    square = causal and known and q.size(1) == k.size(1) and bias is None and key_padding is None
    mask = None if square else visible_keys(q, k, causal, key_padding)
    if key_padding is not None:
        blind = ~mask.any(-1, keepdim=True)  # rows without any key see all keys here, and give zeros below
        mask = mask | blind
    heads = 1 if bias is None else bias.size(0)
    if mask is not None and mask.dim() == 3:
        mask = mask.unflatten(0, (-1, heads))
    if bias is not None:
        matrix = toeplitz_matrix(bias.to(at_least_float32(bias.dtype)), q.size(1), k.size(1)).to(q.dtype)
        # The CPU's kernel takes two or four dimensions.
        mask = matrix.unsqueeze(0) if mask is None else matrix.masked_fill(~mask, float("-inf")).view(-1, *matrix.shape)
    q, k, v = (t.unflatten(0, (-1, heads)) for t in (q, k, v))  # (G / H, H, n, z)
    out = F.scaled_dot_product_attention(q, k, v, mask, dropout, square, scale=scale).flatten(0, 1)
    return out if key_padding is None else out.masked_fill(blind, 0.0)
