"""Rotations of positions, and the rotary bias b_ij = <R_i a, R_j b> = <a, R_{j-i} b> (paper, section 3.2).

The definitions, here and in position.py, run everywhere but on NVIDIA GPUs, whose form is in rotary_kernels.py.
"""

from typing import Tuple

import torch
from torch import Tensor

from mega_fairseq.ops.attention.position import cos_sin_naive, turned_naive
from mega_fairseq.ops.backend import TRITON, backend
from mega_fairseq.ops.precision import at_least_float32


def cos_sin(positions: Tensor, dim: int, dtype: torch.dtype) -> Tuple[Tensor, Tensor]:
    if backend(positions.device) != TRITON:
        return cos_sin_naive(positions, dim, dtype)
    from mega_fairseq.ops.attention import rotary_kernels  # here, since Triton may be missing

    return rotary_kernels.cos_sin(positions, dim, at_least_float32(dtype))


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`rotate` with `cos_sin` of the positions."""
    if backend(x.device) != TRITON:
        return turned_naive(x, cos, sin)
    from mega_fairseq.ops.attention import rotary_kernels  # here, since Triton may be missing

    # The same angles for all heads of a token, and for all sequences.
    heads = x.size(-2) if cos.dim() > 1 and cos.size(-2) == 1 else 1
    return rotary_kernels.turned(x, cos, sin, heads)


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """R_i x for the position i of each row, over half-split dimensions: x (..., n, dim) -> (..., n, dim)."""
    return turned(x, *cos_sin(positions, x.size(-1), x.dtype))


def rotary_distances_naive(a: Tensor, b: Tensor, first: int, stop: int) -> Tensor:
    """The bias for the distances first .. stop - 1, in float32 or better, from a and b (z,)."""
    a, b = (t.to(at_least_float32(t.dtype)) for t in (a, b))
    distances = torch.arange(first, stop, device=b.device)
    return (turned_naive(b, *cos_sin_naive(distances, b.size(0), b.dtype)) * a).sum(-1)


def rotary_distances(a: Tensor, b: Tensor, first: int, stop: int) -> Tensor:
    if backend(a.device) != TRITON:
        return rotary_distances_naive(a, b, first, stop)
    from mega_fairseq.ops.attention import rotary_kernels  # here, since Triton may be missing

    return rotary_kernels.rotary_distances(a, b, first, stop)
