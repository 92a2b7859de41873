"""The rotary bias <R_i a, R_j b> as extra columns of queries and keys, for fused attention kernels.

`with_rotary_columns_naive` is the definition, and triton.py the form for training on NVIDIA GPUs.
"""

from typing import Tuple

import torch
from torch import Tensor

from mega_fairseq.ops.attention.heads import append_columns
from mega_fairseq.ops.attention.position import rotary_columns
from mega_fairseq.ops.backend import TRITON, backend


def with_rotary_columns_naive(
    q: Tensor, k: Tensor, a: Tensor, b: Tensor, scale: float, first_query: int
) -> Tuple[Tensor, Tensor]:
    """[scale q, R_i a] and [k, R_j b]: q (G, n, z) at positions first_query, ..., k (G, m, z) from 0; a, b (z,)."""
    stop, keys = first_query + q.size(1), k.size(1)
    of_queries, of_keys = rotary_columns(a, b, torch.arange(max(stop, keys), device=q.device))
    return append_columns(q * scale, of_queries[first_query:stop]), append_columns(k, of_keys[:keys])


def with_rotary_columns(
    q: Tensor, k: Tensor, a: Tensor, b: Tensor, scale: float, first_query: int
) -> Tuple[Tensor, Tensor]:
    if not torch.is_grad_enabled() or backend(q.device) != TRITON:
        return with_rotary_columns_naive(q, k, a, b, scale, first_query)
    from mega_fairseq.ops.attention.rotary.triton import append  # here, since Triton may be missing

    return append(q, k, a, b, scale, first_query)[:2]
