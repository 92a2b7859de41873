"""Queries and keys of single-head attention from one projection (Mega's eq. 7-9).

`queries_keys_naive` is the definition, and the form for everything but NVIDIA GPUs, which is in triton.py.
"""

from typing import Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mega_fairseq.ops.backend import TRITON, backend


def queries_keys_naive(before: Tensor, kappa: Tensor, mu: Tensor) -> Tuple[Tensor, Tensor]:
    """kappa_i * Z + mu_i with Z = silu(before): (B, L, z) with kappa, mu (2, z) -> queries and keys (B, L, z)."""
    return torch.addcmul(mu[:, None, None], F.silu(before), kappa[:, None, None]).unbind()


def queries_keys(before: Tensor, kappa: Tensor, mu: Tensor) -> Tuple[Tensor, Tensor]:
    if backend(before.device) != TRITON:
        return queries_keys_naive(before, kappa, mu)
    from mega_fairseq.ops.queries_keys import triton  # here, since Triton may be missing

    both = triton.queries_keys(before.flatten(0, 1), kappa, mu)
    return tuple(t.view(before.shape) for t in both)
