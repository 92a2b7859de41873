"""Padding on any side becomes padding on the right: inside, a sequence starts at index 0 and has a length.

Chunk borders, carried states and relative positions then count a sentence's own tokens, never its neighbours' pads.
The one mask convention everywhere: bool (B, L), True = pad.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class _PermuteRows(torch.autograd.Function):
    """x[order]; backward reads instead of scattering, since the inverse order is at hand."""

    @staticmethod
    def forward(ctx, x, order, inverse):
        ctx.save_for_backward(order, inverse)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx, grad):
        order, inverse = ctx.saved_tensors
        return _PermuteRows.apply(grad, inverse, order), None, None


class Alignment(NamedTuple):
    """How the real tokens of a batch move to the front, and back."""

    lengths: Tensor  # (B,)
    order: Tensor  # (B L,) where each aligned row comes from
    inverse: Tensor  # (B L,)

    @classmethod
    def of(cls, padding_mask: Tensor) -> "Alignment":
        batch, length = padding_mask.shape
        order = torch.argsort(padding_mask.int(), dim=1, stable=True)
        inverse = torch.argsort(order, dim=1)
        start = torch.arange(batch, device=order.device).unsqueeze(1) * length
        return cls((~padding_mask).sum(1), (order + start).flatten(), (inverse + start).flatten())

    def front(self, x: Tensor) -> Tensor:
        """(B, L, ...) -> (B, L, ...) with each row's real tokens first, in their order."""
        return _PermuteRows.apply(x.flatten(0, 1), self.order, self.inverse).view(x.shape)

    def back(self, x: Tensor) -> Tensor:
        """The way back to where the tokens came from."""
        return _PermuteRows.apply(x.flatten(0, 1), self.inverse, self.order).view(x.shape)


def padding_from_lengths(lengths: Tensor, size: int) -> Tensor:
    """(B,) -> (B, size) bool, True = pad."""
    return torch.arange(size, device=lengths.device) >= lengths.unsqueeze(1)
