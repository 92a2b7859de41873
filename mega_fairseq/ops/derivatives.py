"""Backward passes that have no derivative themselves."""

from functools import wraps
from typing import Any, Callable

import torch


def once_differentiable(backward: Callable) -> Callable:
    """Refuses second derivatives.

    torch's decorator of this name leaves terms out in silence if only derivatives with respect to inputs are computed.
    """

    @wraps(backward)
    def checked(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError("this layer has no second derivatives; compute the first ones without create_graph=True")
        return backward(ctx, *gradients)

    return checked
