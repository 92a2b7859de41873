"""Attention of queries at one position, as in decoding: they see the same keys at the same distances."""

from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from mega_fairseq.ops.attention.scores import weigh, weighted_sum
from mega_fairseq.ops.precision import at_least_float32, product_dtype


def weights_at_one_position(
    q: Tensor,
    k: Tensor,
    function: str,
    bias: Optional[Tensor] = None,
    key_padding: Optional[Tensor] = None,
    multiplier: Optional[Tensor] = None,
    outer: bool = False,
    scale: Optional[float] = None,
) -> Tensor:
    """The weights of queries (G, n, z) that are all at one position, such as the beams of a sentence: (G, n, m).

    bias and multiplier, (m,) or (H, m), have one number per key. The weights are in float32 or better, for
    `weighted_sum`.
    """
    scale = q.size(-1) ** -0.5 if scale is None else scale
    hidden = None if key_padding is None else key_padding.unsqueeze(1)
    bias, multiplier = (None if t is None else t.unsqueeze(-2) for t in (bias, multiplier))
    return weigh(few_scores(q, k, scale), function, hidden, bias, multiplier, outer, scale)


def few_scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """q k^T `scale` for a few queries: q (G, n, z), k (G, m, z) -> (G, n, m), in float32 or better."""
    dtype = product_dtype(q, q.dtype)
    q, k = q.to(dtype) * scale, k.to(dtype)
    # For a few queries, the CPU's product is twice as fast in this order, tall times narrow.
    return torch.bmm(k, q.transpose(1, 2)).transpose(1, 2).to(at_least_float32(dtype))


# ------------------------------------------------------------------------------------------- heads side by side


def attend_at_one_position(q: Tensor, k: Tensor, v: Tensor, heads: int, bias: Optional[Tensor] = None) -> Tensor:
    """Softmax attention of one query a row: q (R, d), k (R, m, d), v (R, m, e), bias (H, m) -> (R, e).

    The heads of keys and values stay side by side: moving them apart would copy the cache for each token.
    """
    dtype, out = product_dtype(q, q.dtype), v.dtype
    q, k, v = (t.to(dtype).unflatten(-1, (heads, -1)) for t in (q.unsqueeze(1), k, v))
    mask = None if bias is None else bias.to(dtype)[None, :, None]  # the fused kernel only takes 2 or 4 dimensions
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (R, H, m, d / H)
    y = F.scaled_dot_product_attention(q, k, v, mask)
    return y.flatten(1).to(out)


def head_weights_at_one_position(q: Tensor, k: Tensor, heads: int, bias: Optional[Tensor] = None) -> Tensor:
    """The weights of `attend_at_one_position`: (R, H, m), in float32 or better."""
    width = q.size(-1) // heads
    # One query for each head, with zeros in the other heads' dimensions: more products, but the keys are read once.
    own = torch.eye(heads, device=q.device, dtype=q.dtype).repeat_interleave(width, 1)  # (H, d)
    scores = few_scores(q.unsqueeze(1) * own, k, width**-0.5)
    return torch.softmax(scores if bias is None else scores + bias, -1)


def weighted_sum_by_head(weights: Tensor, v: Tensor) -> Tensor:
    """Weights (R, H, m) or (H, m) of each head times its part of v (R, m, e) -> (R, e)."""
    wide = v.to(product_dtype(v, v.dtype))
    rows = weights.expand(v.size(0), -1, -1).split(1, 1)
    # A product for each head reads its part in place; one for all heads would take H times as many multiplications.
    return torch.cat([weighted_sum(*pair) for pair in zip(rows, wide.chunk(len(rows), -1))], -1).squeeze(1).to(v.dtype)
