"""Parameters of modules away from their first values, many of which are zero or equal, which hides mistakes."""

import torch
from torch import nn


@torch.no_grad()
def perturbed(module: nn.Module, scale: float) -> nn.Module:
    """The module in eval mode, after adding random numbers of this scale to its parameters."""
    for parameter in module.parameters():
        parameter.add_(scale * torch.randn_like(parameter))
    return module.eval()
