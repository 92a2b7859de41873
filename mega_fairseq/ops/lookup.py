"""Rows of a table, with exact gradients in half precision."""

from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from mega_fairseq.ops.precision import at_least_float32, sums_in_half


def lookup(indices: Tensor, table: Tensor, padding_idx: Optional[int] = None) -> Tensor:
    """Rows of `table` (V, D), as F.embedding. The gradients of equal rows are added in float32 or better."""
    if not sums_in_half(table) or torch.compiler.is_compiling():  # the number of rows in use is unknown there
        return F.embedding(indices, table, padding_idx)
    used, places = indices.unique(return_inverse=True)
    rows = F.embedding(used, table, padding_idx)  # each row once, so its gradient is not a sum
    rows = rows.to(at_least_float32(table.dtype))
    return F.embedding(places, rows).to(table.dtype)
