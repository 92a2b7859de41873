"""Queries and keys from one projection (Mega's eq. 7-9).

`queries_keys_naive` is the definition, and the form for everything but NVIDIA GPUs, which is in triton.py.
"""

from typing import Tuple

import torch
from torch import Tensor

from mega_fairseq.ops.activations import ACTIVATIONS
from mega_fairseq.ops.backend import TRITON, backend


def queries_keys_naive(before: Tensor, kappa: Tensor, mu: Tensor, activation: str = "silu") -> Tuple[Tensor, Tensor]:
    """kappa_i * Z + mu_i with Z = f(before): (B, L, z) with kappa, mu (2, z) -> queries and keys (B, L, z).

    f is "silu" or "linear".
    """
    z = ACTIVATIONS[activation].forward(before)
    return torch.addcmul(mu[:, None, None], z, kappa[:, None, None]).unbind()


def queries_keys(before: Tensor, kappa: Tensor, mu: Tensor, activation: str = "silu") -> Tuple[Tensor, Tensor]:
    if backend(before.device) != TRITON:
        return queries_keys_naive(before, kappa, mu, activation)
    from mega_fairseq.ops.queries_keys import triton  # here, since Triton may be missing

    both = triton.queries_keys(before.flatten(0, 1), kappa, mu, activation == "silu")
    return tuple(t.view(before.shape) for t in both)
