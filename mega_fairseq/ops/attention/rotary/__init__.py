"""The rotary bias <R_i a, R_j b> as extra columns of queries and keys, for fused attention kernels.

`with_rotary_columns_naive` is the definition, and triton.py the form for training on NVIDIA GPUs.
"""

from typing import Any, List, Sequence, Tuple

import torch
from torch import Tensor

from mega_fairseq.ops.attention.heads import append_columns
from mega_fairseq.ops.attention.position import rotary_columns, turns
from mega_fairseq.ops.backend import TRITON, backend
from mega_fairseq.ops.operators import operator


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
    stop, keys = first_query + q.size(1), k.size(1)
    cos, sin = turns(torch.arange(max(stop, keys), device=q.device), a.size(0), q.dtype)
    return _append(q, a, cos[first_query:stop], sin[first_query:stop], scale), _append(k, b, cos, sin, 1.0)


def _forward(*args: Any) -> Tensor:
    from mega_fairseq.ops.attention.rotary import triton  # here, since Triton may be missing

    return triton.forward(*args)


def _backward(grads: Sequence[Tensor], saved: Sequence[Tensor], *args: Any) -> List[Tensor]:
    from mega_fairseq.ops.attention.rotary import triton

    return triton.backward(grads[0], *args)


# [scale x, R_i vector] for x (G, n, z), with the `turns` of its positions, whose gradients are not computed.
_append = operator(
    "append_rotary_columns",
    "Tensor x, Tensor vector, Tensor cos, Tensor sin, float scale",
    "Tensor",
    _forward,
    lambda x, *_: x.new_empty(x.size(0), x.size(1), 2 * x.size(2)),
    _backward,
    gradients=2,
)
