"""Rotations of positions, and the rotary bias b_ij = <R_i a, R_j b> = <a, R_{j-i} b> (paper, section 3.2).

The definitions, here and in position.py, run everywhere but on NVIDIA GPUs, whose form is in rotary_kernels.py.
"""

import torch
from torch import Tensor

from mega_fairseq.ops.attention.position import cos_sin_naive, turned_naive
from mega_fairseq.ops.backend import Forms
from mega_fairseq.ops.precision import at_least_float32

KERNELS = "mega_fairseq.ops.attention.rotary_kernels"

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
