"""The rotary bias b_ij = <R_i a, R_j b> = <a, R_{j-i} b> (paper, section 3.2) as a function of distance."""

import torch
from torch import Tensor

from mega_fairseq.ops.attention.position import cos_sin_naive, turned_naive
from mega_fairseq.ops.backend import TRITON, backend
from mega_fairseq.ops.precision import at_least_float32


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
