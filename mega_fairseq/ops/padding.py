"""Padding on any side becomes padding on the right: inside, a sequence starts at index 0 and has a length.

Chunk borders, carried states and relative positions then count a sentence's own tokens, never its neighbours' pads.
The one mask convention everywhere: bool (B, L), True = pad.
"""

from typing import NamedTuple, Optional, Tuple, Union

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
    width: int  # of the aligned batch: L, or the longest length
    order: Optional[Tensor] = None  # (B L,) where each aligned row comes from; None where all stand in front already
    inverse: Optional[Tensor] = None  # (B L,)

    @classmethod
    def where_needed(cls, padding_mask: Tensor) -> Optional["Alignment"]:
        """`of` with `crop`, or None where there is no pad at all; a compiler cannot know, and gets an alignment."""
        return cls.of(padding_mask, crop=True) if is_compiling() or padding_mask.any() else None

    @classmethod
    def of(cls, padding_mask: Tensor, crop: bool = False) -> "Alignment":
        """`crop` leaves out the columns that are padding in every row, at the price of reading the lengths."""
        batch, length = padding_mask.shape
        order = torch.argsort(padding_mask.int(), dim=1, stable=True)
        inverse = torch.argsort(order, dim=1)
        start = torch.arange(batch, device=order.device).unsqueeze(1) * length
        lengths = (~padding_mask).sum(1)
        width = max(1, int(lengths.max())) if crop and not is_compiling() else length
        return cls(lengths, width, (order + start).flatten(), (inverse + start).flatten())

    def done(self) -> "Alignment":
        """This batch once its tokens are in front: a stack of layers moves them once, not once a layer."""
        return Alignment(self.lengths, self.width)

    def front(self, x: Tensor) -> Tensor:
        """(B, L, ...) -> (B, width, ...) with each row's real tokens first, in their order."""
        if self.order is None:
            return x
        return _PermuteRows.apply(x.flatten(0, 1), self.order, self.inverse).view(x.shape)[:, : self.width]

    def back(self, x: Tensor) -> Tensor:
        """The way back to where the tokens came from: (B, width, ...) -> (B, L, ...)."""
        if self.order is None:
            return x
        missing = self.order.numel() // x.size(0) - self.width
        if missing:
            x = torch.cat([x, x.new_zeros(x.size(0), missing, *x.shape[2:])], 1)
        return _PermuteRows.apply(x.flatten(0, 1), self.inverse, self.order).view(x.shape)


# What a layer takes as `padding_mask`: bool (B, L), True = pad, on any side; or, from a stack that has aligned its
# batch, what it knows of that. Pads are then zero already.
Padding = Union[Tensor, Alignment]


def to_front(
    x: Tensor, padding: Optional[Padding], reach: Optional[int] = None
) -> Tuple[Tensor, Optional[Alignment], Optional[Tensor]]:
    """x with real tokens first and zeros behind, how it got there, and the mask (B, width) of what is behind.

    `reach` is the longest sequence that the layer can take: where pads make x longer, the lengths are read.
    """
    if padding is None:
        return x, None, None
    if isinstance(padding, Alignment):
        return x, padding, as_mask(padding)
    align = Alignment.of(padding, crop=reach is not None and x.size(1) > reach)
    mask = padding_from_lengths(align.lengths, align.width)
    return align.front(x).masked_fill(mask.unsqueeze(-1), 0.0), align, mask


def as_mask(padding: Optional[Padding]) -> Optional[Tensor]:
    """(B, L) bool, True = pad, whichever way it was given."""
    return padding_from_lengths(padding.lengths, padding.width) if isinstance(padding, Alignment) else padding


def padding_from_lengths(lengths: Tensor, size: int) -> Tensor:
    """(B,) -> (B, size) bool, True = pad."""
    return torch.arange(size, device=lengths.device) >= lengths.unsqueeze(1)
