"""Several heads of attention: splitting widths into heads, partial RoPE, and single positions, as in decoding.

In a cache, the heads of a token are side by side: (B, m, d). Attention takes (B H, m, d / H).
"""

from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from mega_fairseq.ops.attention.chunks import Place
from mega_fairseq.ops.attention.position import rotate
from mega_fairseq.ops.attention.scores import weighted_sum
from mega_fairseq.ops.precision import at_least_float32, product_dtype


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(B, n, d) -> (B H, n, d / H)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2).flatten(0, 1)


def merge_heads(x: Tensor, heads: int) -> Tensor:
    """(B H, n, d / H) -> (B, n, d)."""
    return x.unflatten(0, (-1, heads)).transpose(1, 2).flatten(2)


def scale_places(x: Tensor, factors: Tensor) -> Tensor:
    """x (B H, n, w) times a number for each head and place, (H, n)."""
    return (x.unflatten(0, (-1, factors.size(0))) * factors.to(x.dtype).unsqueeze(-1)).flatten(0, 1)


def rotate_heads(x: Tensor, first: Place, heads: int, dims: int, chunk_size: Optional[int] = None) -> Tensor:
    """RoPE on the first `dims` dimensions of each head of x (B, n, d), at places first, first + 1, .. in chunks."""
    if dims == 0:
        return x
    places = first + torch.arange(x.size(1), device=x.device)  # (n,) or (B, n)
    places = places if chunk_size is None else places % chunk_size
    wide = x.unflatten(-1, (heads, -1))  # (B, n, H, d / H)
    rotated = rotate(wide[..., :dims], places.unsqueeze(-1))
    return torch.cat([rotated, wide[..., dims:]], -1).flatten(-2)


# ------------------------------------------------------------------------------------------- single positions


def attend_at_one_position(q: Tensor, k: Tensor, v: Tensor, heads: int, bias: Optional[Tensor] = None) -> Tensor:
    """Softmax attention of one query a row: q (R, d), k (R, m, d), v (R, m, e), bias (H, m) -> (R, e).

    The heads of keys and values stay side by side: moving them apart would copy the cache for each token.
    """
    dtype, out = product_dtype(q.device.type, q.dtype), v.dtype
    q, k, v = (t.to(dtype).unflatten(-1, (heads, -1)) for t in (q.unsqueeze(1), k, v))
    mask = None if bias is None else bias.to(dtype)[None, :, None]  # the fused kernel only takes 2 or 4 dimensions
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (R, H, m, d / H)
    y = F.scaled_dot_product_attention(q, k, v, mask)
    return y.flatten(1).to(out)


def head_weights_at_one_position(q: Tensor, k: Tensor, heads: int, bias: Optional[Tensor] = None) -> Tensor:
    """The weights of `attend_at_one_position`: (R, H, m), in float32 or better."""
    dtype, width = product_dtype(q.device.type, q.dtype), q.size(-1) // heads
    # One query for each head, with zeros in the other heads' dimensions: more products, but the keys are read once.
    apart = q.to(dtype).unsqueeze(1) * _own_dimensions(q, heads).to(dtype)  # (R, H, d)
    scores = torch.bmm(k.to(dtype), apart.transpose(1, 2)).transpose(1, 2).to(at_least_float32(dtype))
    scores = scores * width**-0.5
    return torch.softmax(scores if bias is None else scores + bias, -1)


def weighted_sum_by_head(weights: Tensor, v: Tensor) -> Tensor:
    """Weights (R, H, m) or (H, m) of each head times its part of v (R, m, e) -> (R, e)."""
    wide = v.to(product_dtype(v.device.type, v.dtype))
    rows = weights.expand(v.size(0), -1, -1).split(1, 1)
    # A product for each head reads its part in place; one for all heads would take H times as many multiplications.
    return torch.cat([weighted_sum(*pair) for pair in zip(rows, wide.chunk(len(rows), -1))], -1).squeeze(1).to(v.dtype)


def _own_dimensions(x: Tensor, heads: int) -> Tensor:
    """(H, d) with ones at the dimensions of each head."""
    return torch.eye(heads, device=x.device, dtype=x.dtype).repeat_interleave(x.size(-1) // heads, 1)
