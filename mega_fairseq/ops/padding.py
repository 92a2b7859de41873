"""Padding on any side becomes padding on the right: inside, a sequence starts at index 0 and has a length.

Chunk borders, carried states and relative positions then count a sentence's own tokens, never its neighbours' pads.
The one mask convention everywhere: bool (B, L), True = pad.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from mega_fairseq.ops.precision import is_compiling


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
    width: int  # of the aligned batch: L, or the longest length

    @classmethod
    def of(cls, padding_mask: Tensor, crop: bool = False) -> "Alignment":
        """`crop` leaves out the columns that are padding in every row, at the price of reading the lengths."""
        batch, length = padding_mask.shape
        order = torch.argsort(padding_mask.int(), dim=1, stable=True)
        inverse = torch.argsort(order, dim=1)
        start = torch.arange(batch, device=order.device).unsqueeze(1) * length
        lengths = (~padding_mask).sum(1)
        width = max(1, int(lengths.max())) if crop and not is_compiling() else length
        return cls(lengths, (order + start).flatten(), (inverse + start).flatten(), width)

    def front(self, x: Tensor) -> Tensor:
        """(B, L, ...) -> (B, width, ...) with each row's real tokens first, in their order."""
        return _PermuteRows.apply(x.flatten(0, 1), self.order, self.inverse).view(x.shape)[:, : self.width]

    def back(self, x: Tensor) -> Tensor:
        """The way back to where the tokens came from: (B, width, ...) -> (B, L, ...)."""
        missing = self.order.numel() // x.size(0) - self.width
        if missing:
            x = torch.cat([x, x.new_zeros(x.size(0), missing, *x.shape[2:])], 1)
        return _PermuteRows.apply(x.flatten(0, 1), self.inverse, self.order).view(x.shape)


def padding_from_lengths(lengths: Tensor, size: int) -> Tensor:
    """(B,) -> (B, size) bool, True = pad."""
    return torch.arange(size, device=lengths.device) >= lengths.unsqueeze(1)
