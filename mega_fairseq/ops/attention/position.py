"""Relative position biases as functions of distance, and rotations of positions (paper, section 3.2).

A distance is key position minus query position.
"""

import math
from typing import Tuple

import torch
from torch import Tensor

from mega_fairseq.ops.precision import at_least_float32

ROTARY_BASE = 10000.0
ALIBI_SLOPE = 2.0**-8  # ALiBi's slope for a single head
T5_BUCKETS, T5_MAX_DISTANCE = 32, 128


def cos_sin_naive(positions: Tensor, dim: int, dtype: torch.dtype) -> Tuple[Tensor, Tensor]:
    """cos and sin of position times frequency, (...) -> (..., dim / 2), in float32 or better.

    They are computed in float64, since positions are unbounded.
    """
    half = dim // 2
    frequencies = torch.arange(half, dtype=torch.float64, device=positions.device)
    frequencies = torch.exp(frequencies * (-math.log(ROTARY_BASE) / half))
    angles = positions.to(torch.float64).unsqueeze(-1) * frequencies
    wide = at_least_float32(dtype)
    return angles.cos().to(wide), angles.sin().to(wide)


def turned_naive(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """R_i x for the position i of each row, with its `cos_sin` (..., r / 2), over half-split dimensions.

    Only the first r dimensions of x turn.
    """
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
