"""Several heads of attention: splitting widths into heads, extra columns, and partial RoPE.

In a cache, the heads of a token are side by side: (B, m, d). Attention takes (B H, m, d / H).
"""

from typing import List, Optional, Sequence

import torch
from torch import Tensor

from mega_fairseq.ops.attention.chunks import Place
from mega_fairseq.ops.attention.position import cos_sin, turned


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(B, n, d) -> (B H, n, d / H)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2).flatten(0, 1)


def merge_heads(x: Tensor, heads: int) -> Tensor:
    """(B H, n, d / H) -> (B, n, d)."""
    return x.unflatten(0, (-1, heads)).transpose(1, 2).flatten(2)


def scale_places(x: Tensor, factors: Tensor) -> Tensor:
    """x (B H, n, w) times a number for each head and place, (H, n)."""
    return (x.unflatten(0, (-1, factors.size(0))) * factors.to(x.dtype).unsqueeze(-1)).flatten(0, 1)


def append_columns(x: Tensor, columns: Tensor) -> Tensor:
    """[x, columns] for x (B H, n, w) and columns (n, r), or (H, n, r) with some for each head."""
    columns = columns if columns.dim() == 3 else columns.unsqueeze(0)
    x = x.unflatten(0, (-1, columns.size(0)))
    return torch.cat([x, columns.to(x.dtype).expand(x.size(0), -1, -1, -1)], -1).flatten(0, 1)


def rotate_heads(
    xs: Sequence[Tensor], first: Place, heads: int, dims: int, chunk_size: Optional[int] = None
) -> List[Tensor]:
    """RoPE on the first `dims` dimensions of each head of all x (B, n, d), at places first, first + 1, .. in chunks."""
    if dims == 0:
        return list(xs)
    places = first + torch.arange(xs[0].size(1), device=xs[0].device)  # (n,) or (B, n)
    places = places if chunk_size is None else places % chunk_size
    tables = cos_sin(places.unsqueeze(-1), dims, xs[0].dtype)
    return [turned(x.unflatten(-1, (heads, -1)), *tables).flatten(-2) for x in xs]
