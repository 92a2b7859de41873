"""States of token mixers.

A state is a value: a NamedTuple of batch-first tensors, of `KeyValues` for tensors that grow token by token, and of
such tuples. `walk` goes through every field, so a new kind of state needs no code to be reordered.
"""

from typing import Any, Callable, NamedTuple, Tuple, Union

from torch import Tensor

from mega_fairseq.ops.attention.chunks import KeyValues
from mega_fairseq.ops.attention.fixed import FixedKeyValues

MixerState = Tuple[Any, ...]  # each mixer has its own NamedTuple
Shape = Tuple[Union[int, str], ...]  # of one row; a string stands for any size


class TokenShiftState(NamedTuple):
    """The state of a mixer with token shift."""

    last: Tensor  # (B, floor(D / 2)) of each row's last real token
    mixer: MixerState


class OpenChunk(NamedTuple):
    """The state of a mixer that remembers only the unfinished chunk."""

    cache: KeyValues


def walk(part: Any, on_tensor: Callable[[Tensor], Tensor], on_cache: Callable[[Any], Any]) -> Any:
    """A state of the same structure, with each tensor and each cache replaced."""
    if isinstance(part, Tensor):
        return on_tensor(part)
    if isinstance(part, (KeyValues, FixedKeyValues)):
        return on_cache(part)
    if isinstance(part, tuple):
        return type(part)(*(walk(field, on_tensor, on_cache) for field in part))
    return part


def batch_size(state: MixerState) -> int:
    """The number of rows of a state."""
    first = state[0]
    return first.size(0) if isinstance(first, Tensor) else batch_size(first)
