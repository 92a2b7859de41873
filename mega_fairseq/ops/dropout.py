"""Dropout as a value: the mask is drawn first and handed to the op, which stays a function of its inputs."""

from typing import Optional, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor


def keep_mask(shape: Sequence[int], dropout: float, device: torch.device) -> Tuple[Optional[Tensor], float]:
    """A bool mask of what survives, one byte an entry, and the factor that keeps the mean; (None, 1) for no dropout."""
    if dropout == 0.0:
        return None, 1.0
    keep = torch.empty(tuple(shape), dtype=torch.bool, device=device).bernoulli_(1.0 - dropout)
    return keep, 1.0 / (1.0 - dropout)


def dropped(x: Tensor, dropout: float, features: bool) -> Tensor:
    """Dropout on (B, L, D); `features` drops whole channels of a sequence, the same ones at every step of it."""
    if dropout == 0.0:
        return x
    if not features:
        return F.dropout(x, dropout)
    keep, scale = keep_mask((x.size(0), 1, x.size(2)), dropout, x.device)
    return x * (keep * scale).to(x.dtype)
