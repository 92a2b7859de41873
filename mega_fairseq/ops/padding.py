"""Converts padding on any side to padding on the right, so that each sequence starts at index 0 and has a length.

Chunk borders, carried states and relative positions then count the tokens of a sequence and not its pads. All masks are
bool (B, L), True = pad.
"""

from typing import Callable, NamedTuple, Optional, Tuple, Union

import torch
from torch import Tensor


def _extremes(lengths: Tensor, width: int) -> Tuple[int, int]:
    """The shortest and the longest length, together, since a GPU waits for each; while compiling, what they may be."""
    return (0, width) if torch.compiler.is_compiling() else tuple(torch.stack(lengths.aminmax()).tolist())


def _resized(x: Tensor, length: int) -> Tensor:
    """(B, L, ...) -> (B, length, ...), cut or with zeros at the end."""
    if length <= x.size(1):
        return x[:, :length]
    return torch.cat([x, x.new_zeros(x.size(0), length - x.size(1), *x.shape[2:])], 1)


class Alignment(NamedTuple):
    """Moves the real tokens of a batch to the front, and back."""

    lengths: Tensor  # (B,)
    width: int  # of the aligned batch: L, the longest length, or more
    order: Optional[Tensor] = None  # (B L,) the source of each aligned row; None if already aligned
    inverse: Optional[Tensor] = None  # (B L,)

    @classmethod
    def where_needed(cls, padding_mask: Tensor, width: Optional[Callable[[int], int]] = None) -> Optional["Alignment"]:
        """`of` with `crop`, or None if there are no pads; always an alignment when compiling, where that is unknown.

        `width` maps the longest length to the width of the aligned batch.
        """
        lengths, length = (~padding_mask).sum(1), padding_mask.size(1)
        shortest, longest = _extremes(lengths, length)
        longest = longest if width is None else width(longest)
        return None if shortest == length == longest else cls._of(padding_mask, lengths, longest)

    @classmethod
    def of(cls, padding_mask: Tensor, crop: bool = False) -> "Alignment":
        """`crop` leaves out columns that are padding in every row; on a GPU this waits for the lengths."""
        lengths = (~padding_mask).sum(1)
        width = padding_mask.size(1)
        return cls._of(padding_mask, lengths, _extremes(lengths, width)[1] if crop else width)

    @classmethod
    def _of(cls, padding_mask: Tensor, lengths: Tensor, longest: int) -> "Alignment":
        batch, length = padding_mask.shape
        order = torch.argsort(padding_mask.int(), dim=1, stable=True)
        inverse = torch.argsort(order, dim=1)
        start = torch.arange(batch, device=order.device).unsqueeze(1) * length
        return cls(lengths, max(1, longest), (order + start).flatten(), (inverse + start).flatten())

    def done(self) -> "Alignment":
        """The alignment of the batch that `front` returned, so that a stack of layers moves its tokens only once."""
        return Alignment(self.lengths, self.width)

    def front(self, x: Tensor) -> Tensor:
        """(B, L, ...) -> (B, width, ...) with each row's real tokens first, in the same order."""
        if self.order is None:
            return x
        return _resized(x.flatten(0, 1).index_select(0, self.order).view(x.shape), self.width)

    def back(self, x: Tensor) -> Tensor:
        """The inverse of `front`: (B, width, ...) -> (B, L, ...)."""
        if self.order is None:
            return x
        x = _resized(x, self.order.numel() // x.size(0))
        return x.flatten(0, 1).index_select(0, self.inverse).view(x.shape)


# What a layer takes as `padding_mask`: bool (B, L), True = pad, on any side; or the alignment (`done`) of a batch that
# is already aligned, with zeros at pads.
Padding = Union[Tensor, Alignment]


def to_front(
    x: Tensor, padding: Optional[Padding], reach: Optional[int] = None
) -> Tuple[Tensor, Optional[Alignment], Optional[Tensor]]:
    """x with real tokens first and zeros at pads, its alignment, and the mask (B, width) of its pads.

    `reach` is the longest sequence that the layer can take: an x that is longer, pads included, is cropped.
    """
    if padding is None:
        return x, None, None
    if isinstance(padding, Alignment):
        return x, padding, as_mask(padding)
    align = Alignment.of(padding, crop=reach is not None and x.size(1) > reach)
    mask = padding_from_lengths(align.lengths, align.width)
    return align.front(x).masked_fill(mask.unsqueeze(-1), 0.0), align, mask


def as_mask(padding: Optional[Padding]) -> Optional[Tensor]:
    """(B, L) bool, True = pad, for either kind of `Padding`."""
    return padding_from_lengths(padding.lengths, padding.width) if isinstance(padding, Alignment) else padding


def padding_from_lengths(lengths: Tensor, size: int) -> Tensor:
    """(B,) -> (B, size) bool, True = pad."""
    return torch.arange(size, device=lengths.device) >= lengths.unsqueeze(1)


def zeros_at_pads(x: Tensor, lengths: Optional[Tensor]) -> Tensor:
    """x (B, L, D) with zeros from each row's length on."""
    return x if lengths is None else x.masked_fill(padding_from_lengths(lengths, x.size(1)).unsqueeze(-1), 0.0)
