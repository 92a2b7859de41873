"""Dropout masks. They are drawn first and passed to the operators, which are thus deterministic functions."""

from typing import Optional, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mega_fairseq.ops.backend import on_cpu

SHARES = 2**16  # on the CPU, probabilities are multiples of 1 / SHARES


def keep_mask(shape: Sequence[int], dropout: float, device: torch.device) -> Tuple[Optional[Tensor], float]:
    """A bool mask of the entries to keep, and the factor that preserves the mean; (None, 1) without dropout."""
    if dropout == 0.0:
        return None, 1.0
    if device.type == "cpu":
        return _keep_by_bits(torch.Size(shape), dropout)
    keep = torch.empty(tuple(shape), dtype=torch.bool, device=device).bernoulli_(1.0 - dropout)
    return keep, 1.0 / (1.0 - dropout)


def _keep_by_bits(shape: torch.Size, dropout: float) -> Tuple[Tensor, float]:
    """Four entries from each 64 random bits: four times as fast as torch's bernoulli_ on the CPU."""
    kept, count = min(max(1, round((1.0 - dropout) * SHARES)), SHARES - 1), shape.numel()
    bits = torch.randint(-(2**63), 2**63 - 1, ((count + 3) // 4,), device="cpu").view(torch.int16)
    return (bits[:count] < kept - SHARES // 2).view(shape), SHARES / kept


def dropped(x: Tensor, dropout: float, features: bool) -> Tensor:
    """Dropout on (B, L, D); with `features`, whole channels of a sequence, the same ones at every position."""
    if dropout == 0.0:
        return x
    if not on_cpu(x) and not features:
        return F.dropout(x, dropout)  # a single kernel
    shape = (x.size(0), 1, x.size(2)) if features else x.shape
    keep, scale = keep_mask(shape, dropout, x.device)
    return x * (keep * scale).to(x.dtype)
