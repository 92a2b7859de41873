"""Projections as the paper initialises them."""

from torch import nn


def linear(in_dim: int, out_dim: int) -> nn.Linear:
    """A projection with weights N(0, 0.02) and bias 0."""
    layer = nn.Linear(in_dim, out_dim)
    nn.init.normal_(layer.weight, std=0.02)
    nn.init.zeros_(layer.bias)
    return layer
