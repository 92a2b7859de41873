"""Relative position biases as functions of distance, and rotations of positions (paper, section 3.2).

A distance is key position minus query position. The rotary bias is b_ij = <R_i a, R_j b> = <a, R_{j-i} b>. The
definitions run everywhere but on NVIDIA GPUs, whose form is in rotary_kernels.py.
"""

import math
from typing import Tuple

import torch
from torch import Tensor

from mega_fairseq.ops.backend import Forms
from mega_fairseq.ops.precision import at_least_float32, widest
from mega_fairseq.ops.turns import ROTARY_BASE, fraction_of_turn, in_parts

KERNELS = "mega_fairseq.ops.attention.rotary_kernels"
ALIBI_SLOPE = 2.0**-8  # ALiBi's slope for a single head
T5_BUCKETS, T5_MAX_DISTANCE = 32, 128


def cos_sin_naive(positions: Tensor, dim: int, dtype: torch.dtype) -> Tuple[Tensor, Tensor]:
    """cos and sin of position times frequency, (...) -> (..., dim / 2), in float32 or better.

    They are computed in float64, since positions are unbounded, or from fractions of a turn.
    """
    device, wide = positions.device, at_least_float32(dtype)
    exact = widest(device) == torch.float64
    exponents = torch.arange(dim // 2, dtype=torch.float64, device=device if exact else "cpu")
    frequencies = torch.exp(exponents * (-math.log(ROTARY_BASE) / (dim // 2)))
    if exact:
        angles = positions.to(torch.float64).unsqueeze(-1) * frequencies
    else:
        turns = tuple(part.to(device, torch.float32) for part in in_parts(frequencies / (2.0 * math.pi)))
        angles = fraction_of_turn(turns, positions.unsqueeze(-1)) * (2.0 * math.pi)
    return angles.cos().to(wide), angles.sin().to(wide)


def turned_naive(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """R_i x for the position i of each row, with its `cos_sin` (..., r / 2), over half-split dimensions.

    Only the first r dimensions of x turn.
    """
    half = cos.size(-1)
    first, second, rest = x.to(cos.dtype).split([half, half, x.size(-1) - 2 * half], -1)
    left = torch.addcmul(first * cos, second, sin, value=-1.0)
    return torch.cat([left, torch.addcmul(second * cos, first, sin), rest], -1).to(x.dtype)


cos_sin = Forms(cos_sin_naive, triton=f"{KERNELS}:cos_sin")
turned = Forms(turned_naive, triton=f"{KERNELS}:turned")  # `rotate` with `cos_sin` of the positions


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """R_i x for the position i of each row, over half-split dimensions: x (..., n, dim) -> (..., n, dim)."""
    return turned(x, *cos_sin(positions, x.size(-1), x.dtype))


def rotary_distances_naive(a: Tensor, b: Tensor, first: int, stop: int) -> Tensor:
    """The bias for the distances first .. stop - 1, in float32 or better, from a and b (z,)."""
    a, b = (t.to(at_least_float32(t.dtype)) for t in (a, b))
    distances = torch.arange(first, stop, device=b.device)
    return (turned_naive(b, *cos_sin_naive(distances, b.size(0), b.dtype)) * a).sum(-1)


rotary_distances = Forms(rotary_distances_naive, triton=f"{KERNELS}:rotary_distances")


def t5_bucket(distances: Tensor, causal: bool) -> Tensor:
    """T5's buckets: one for each small distance, logarithmic ones up to 128, and one for all larger ones."""
    buckets = T5_BUCKETS
    if causal:
        offset, reach = torch.zeros_like(distances), (-distances).clamp_min(0)
    else:
        buckets //= 2
        offset, reach = (distances > 0).long() * buckets, distances.abs()
    exact = buckets // 2
    ratio = torch.log(reach.clamp_min(1).float() / exact) / math.log(T5_MAX_DISTANCE / exact)
    # 1e-3, since whole numbers may be rounded down; other results are at least 0.01 below one
    coarse = (exact + (ratio * (buckets - exact) + 1e-3).long()).clamp_max(buckets - 1)
    return offset + torch.where(reach < exact, reach, coarse)
