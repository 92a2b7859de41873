"""Relative position biases as functions of distance, and rotations of positions (paper, section 3.2).

A distance is key position minus query position. On NVIDIA GPUs, rotations run in rotary_kernels.py.
"""

import math
from typing import Tuple

import torch
from torch import Tensor

from mega_fairseq.ops.backend import TRITON, backend
from mega_fairseq.ops.precision import at_least_float32

ROTARY_BASE = 10000.0
ALIBI_SLOPE = 2.0**-8  # ALiBi's slope for a single head
T5_BUCKETS, T5_MAX_DISTANCE = 32, 128


def cos_sin(positions: Tensor, dim: int, dtype: torch.dtype) -> Tuple[Tensor, Tensor]:
    """cos and sin of position times frequency, (...) -> (..., dim / 2), in float32 or better.

    They are computed in float64, since positions are unbounded.
    """
    if backend(positions.device) == TRITON:
        from mega_fairseq.ops.attention import rotary_kernels  # here, since Triton may be missing

        return rotary_kernels.cos_sin(positions, dim, at_least_float32(dtype))
    return cos_sin_naive(positions, dim, dtype)


def cos_sin_naive(positions: Tensor, dim: int, dtype: torch.dtype) -> Tuple[Tensor, Tensor]:
    half = dim // 2
    frequencies = torch.arange(half, dtype=torch.float64, device=positions.device)
    frequencies = torch.exp(frequencies * (-math.log(ROTARY_BASE) / half))
    angles = positions.to(torch.float64).unsqueeze(-1) * frequencies
    wide = at_least_float32(dtype)
    return angles.cos().to(wide), angles.sin().to(wide)


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """R_i x for the position i of each row, over half-split dimensions: x (..., n, dim) -> (..., n, dim)."""
    return turned(x, *cos_sin(positions, x.size(-1), x.dtype))


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`rotate` with `cos_sin` of the positions, (..., r / 2): only the first r dimensions of x turn."""
    if backend(x.device) != TRITON:
        return turned_naive(x, cos, sin)
    from mega_fairseq.ops.attention import rotary_kernels  # here, since Triton may be missing

    # The same angles for all heads of a token, and for all sequences.
    heads = x.size(-2) if cos.dim() > 1 and cos.size(-2) == 1 else 1
    return rotary_kernels.turned(x, cos, sin, heads)


def turned_naive(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.size(-1)
    first, second, rest = x.to(cos.dtype).split([half, half, x.size(-1) - 2 * half], -1)
    left = torch.addcmul(first * cos, second, sin, value=-1.0)
    return torch.cat([left, torch.addcmul(second * cos, first, sin), rest], -1).to(x.dtype)


def t5_bucket(distances: Tensor, causal: bool) -> Tensor:
    """T5's buckets: one for each small distance, logarithmic ones up to 128, and one for all larger ones."""
    buckets = T5_BUCKETS
    if causal:
        offset, reach = torch.zeros_like(distances), (-distances).clamp_min(0)
    else:
        buckets //= 2
        offset, reach = (distances > 0).long() * buckets, distances.abs()
    exact = buckets // 2
    ratio = torch.log(reach.clamp_min(1).double() / exact) / math.log(T5_MAX_DISTANCE / exact)
    coarse = (exact + (ratio * (buckets - exact)).long()).clamp_max(buckets - 1)
    return offset + torch.where(reach < exact, reach, coarse)
