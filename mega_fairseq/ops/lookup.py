"""Rows of a table, with exact gradients in half precision."""

from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from mega_fairseq.ops.precision import at_least_float32, is_compiling


def lookup(indices: Tensor, table: Tensor, padding_idx: Optional[int] = None) -> Tensor:
    """Rows of `table` (V, D), as F.embedding. The gradients of equal rows are added in float32 or better.

    On the CPU torch adds them in the table's dtype: in bfloat16 a sum stops growing after a few hundred terms.
    """
    wide = at_least_float32(table.dtype)
    if table.device.type != "cpu" or table.dtype == wide or not torch.is_grad_enabled() or is_compiling():
        return F.embedding(indices, table, padding_idx)
    used, places = indices.unique(return_inverse=True)
    rows = F.embedding(used, table, padding_idx).to(wide)  # each row once, so its gradient is no sum
    return F.embedding(places, rows).to(table.dtype)
