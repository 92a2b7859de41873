"""Parameters of modules away from their first values, many of which are zero or equal, which hides mistakes."""

from typing import Optional

import torch
from torch import nn


@torch.no_grad()
def perturbed(module: nn.Module, scale: float, adaptive: Optional[float] = None) -> nn.Module:
    """The module in eval mode, after adding random numbers of this scale to its parameters.

    `adaptive` is another scale for parameters of adaptive embeddings and softmax.
    """
    for name, parameter in module.named_parameters():
        own = scale if adaptive is None or "adaptive" not in name else adaptive
        parameter.add_(own * torch.randn_like(parameter))
    return module.eval()
