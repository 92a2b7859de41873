"""The definition of AFT, by a tensor of n x m x D entries."""

from typing import Optional

import torch
from torch import Tensor

from mega_fairseq.ops.aft.sums import Sums, as_token
from mega_fairseq.ops.precision import at_least_float32, without_autocast


def of_channels(table: Tensor, dim: int) -> Tensor:
    """A table of heads by channels: (H, n) -> (n, D)."""
    return table.t().repeat_interleave(dim // table.size(0), 1)


def aft_naive(
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    causal: bool = True,
    queries: Optional[int] = None,
    padding: Optional[Tensor] = None,
    older: Optional[Sums] = None,
) -> Tensor:
    """k, v (B, m, D) -> the last `queries` rows of o (B, n, D), by default all. `padding` (B, m) is True at pads."""
    batch, keys, dim = k.shape
    dtype, lowest = v.dtype, torch.finfo(at_least_float32(k.dtype)).min
    with without_autocast(k):
        k, v, weight = (t.to(at_least_float32(t.dtype)) for t in (k, v, weight))
        rows = torch.arange(keys - (queries or keys), keys, device=k.device)
        distance = rows.unsqueeze(1) - torch.arange(keys, device=k.device)  # (n, m)
        first = 0 if causal else weight.size(1) // 2  # the index of distance 0
        within = (distance + first >= 0) & (distance + first < weight.size(1))
        w = weight[:, (distance + first).clamp(0, weight.size(1) - 1)].masked_fill(~within, 0.0)  # (H, n, m)
        w = w.repeat_interleave(dim // weight.size(0), 0).permute(1, 2, 0)  # (n, m, D)
        a = k.unsqueeze(1) + w
        if causal:
            a = a.masked_fill((distance < 0).unsqueeze(-1), lowest)
        if padding is not None:
            a = a.masked_fill(padding[:, None, :, None], lowest)
        if older is not None:
            key, value = as_token(older)
            a = torch.cat([key[:, None, None].expand(-1, a.size(1), -1, -1), a], 2)
            v = torch.cat([value.unsqueeze(1), v], 1)
        return (torch.softmax(a, 2) * v.unsqueeze(1)).sum(2).to(dtype)
