"""What fixed sparse attention remembers of a window: the unfinished block, and the last places of finished blocks."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mega_fairseq.ops.attention.chunks import KeyValues, unfinished_chunk
from mega_fairseq.ops.padding import padding_from_lengths


class Summarized(NamedTuple):
    """The places of a window that later places see."""

    open: KeyValues  # the unfinished block: (B, up to l - 1, d)
    summaries: KeyValues  # the last `kept` places of each of F finished blocks: (B, F kept, d), or without width


def summarize(cache: KeyValues, stride: int, kept: int, width: int) -> Summarized:
    """From all places of a window, real tokens first. `width` of the summaries is d, or 0 if no head sees them."""
    k, v, padding, buffer = cache
    blocks, lengths, hidden = k.size(1) // stride, None, None
    if padding is not None:
        lengths = (~padding).sum(1)
        hidden = padding_from_lengths(lengths // stride, blocks).repeat_interleave(kept, 1)  # (B, F kept)

    def last_places(x: Tensor) -> Tensor:
        x = x[:, : blocks * stride].unflatten(1, (blocks, stride))[:, :, stride - kept :, :width]
        x = x.reshape(x.size(0), blocks * kept, x.size(-1))
        return x.clone() if hidden is None else x.masked_fill(hidden.unsqueeze(-1), 0.0)

    return Summarized(
        unfinished_chunk(k, v, stride, lengths, buffer), KeyValues(last_places(k), last_places(v), hidden)
    )


def advance(state: Summarized, joined: KeyValues, stride: int, kept: int, width: int) -> Summarized:
    """The next state, if `joined` is the open block and the places after it, and rows have no pads."""
    if joined.keys.size(1) < stride:
        return Summarized(joined, state.summaries)
    after = summarize(joined, stride, kept, width)
    return Summarized(after.open, state.summaries.append(*after.summaries[:2], None))


def restore(state: Summarized, stride: int, kept: int) -> KeyValues:
    """All places of the window, with zeros for those that no later place sees."""
    dim = state.open.keys.size(2)

    def whole(summaries: Tensor, last: Tensor) -> Tensor:
        ends = summaries.unflatten(1, (summaries.size(1) // kept, kept))  # (B, F, kept, d)
        blocks = F.pad(ends, (0, dim - ends.size(-1), stride - kept, 0))  # (B, F, l, d)
        return torch.cat([blocks.flatten(1, 2), last], 1)

    keys, values = (whole(*pair) for pair in zip(state.summaries[:2], state.open[:2]))
    if state.open.padding is None and state.summaries.padding is None:
        return KeyValues(keys, values)
    last, blocks = (unused_places(part) for part in state)  # rows may differ in only one of the two
    return KeyValues(keys, values, torch.cat([blocks[:, ::kept].repeat_interleave(stride, 1), last], 1))


def unused_places(part: KeyValues) -> Tensor:
    """(B, m) bool."""
    return part.keys.new_zeros(part.keys.shape[:2], dtype=torch.bool) if part.padding is None else part.padding
