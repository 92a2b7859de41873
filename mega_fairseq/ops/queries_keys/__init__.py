"""Queries and keys from one projection (Mega's eq. 7-9).

`queries_keys_naive` is the definition, and the form for everything but NVIDIA GPUs, which is in triton.py.
"""

from typing import Tuple

import torch
from torch import Tensor

from mega_fairseq.ops.activations import ACTIVATIONS
from mega_fairseq.ops.backend import Forms


def queries_keys_naive(before: Tensor, kappa: Tensor, mu: Tensor, activation: str = "silu") -> Tuple[Tensor, Tensor]:
    """kappa_i * Z + mu_i with Z = f(before): (B, L, z) with kappa, mu (2, z) -> queries and keys (B, L, z).

    f is "silu" or "linear".
    """
    z = ACTIVATIONS[activation].forward(before)
    return torch.addcmul(mu[:, None, None], z, kappa[:, None, None]).unbind()


queries_keys = Forms(queries_keys_naive, triton="mega_fairseq.ops.queries_keys.triton:queries_keys")
