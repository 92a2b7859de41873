"""Rows of a table, with exact gradients in half precision."""

from typing import List, Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from mega_fairseq.ops.operators import is_plain, operator
from mega_fairseq.ops.precision import at_least_float32, sums_in_half


def lookup(indices: Tensor, table: Tensor, padding_idx: Optional[int] = None) -> Tensor:
    """Rows of `table` (V, D), as F.embedding. The gradients of equal rows are added in float32 or better."""
    return (_lookup if sums_in_half(table) and is_plain(table) else F.embedding)(indices, table, padding_idx)


def _backward(grads, _, indices: Tensor, table: Tensor, padding_idx: Optional[int]) -> List[Tensor]:
    used, places = indices.unique(return_inverse=True)
    wide = grads[0].to(at_least_float32(table.dtype))
    rows = torch.ops.aten.embedding_dense_backward(wide, places, used.numel(), -1, False).to(table.dtype)
    gradient = torch.zeros_like(table).index_copy_(0, used, rows)
    return [gradient if padding_idx is None else gradient.index_fill_(0, used.new_tensor([padding_idx]), 0.0)]


_lookup = operator(
    "lookup(Tensor indices, Tensor table, int? padding_idx) -> Tensor", F.embedding, F.embedding, _backward
)
