"""Projections and their initialisation: as released, or scaled to the width of the input."""

import torch
from torch import nn

from mega_fairseq.ops.linear import Projection, ready_linear

# N(0, 0.02) for all, including kappa, as in the release; or N(0, 1/in) with kappa = 1, so that scores start at order 1.
# The released scale is for widths of at least 512 and hundreds of thousands of updates: docs/results.md shows its
# effect on a small model after a thousand updates.
INITS = ("released", "scaled")
RELEASED_STD = 0.02


def linear(in_dim: int, out_dim: int, init: str = "released") -> nn.Linear:
    """A projection with weights N(0, 0.02) or N(0, 1/in) and bias 0."""
    layer = nn.Linear(in_dim, out_dim)
    nn.init.normal_(layer.weight, std=RELEASED_STD if init == "released" else in_dim**-0.5)
    nn.init.zeros_(layer.bias)
    return layer


def side_by_side(*layers: nn.Linear) -> Projection:
    """Combines projections of the same input in one product, packed for a few rows."""
    return ready_linear(torch.cat([p.weight for p in layers]), torch.cat([p.bias for p in layers]))
