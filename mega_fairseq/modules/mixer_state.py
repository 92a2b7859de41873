"""States of token mixers.

A state is a value: a NamedTuple of batch-first tensors, of `KeyValues` for tensors that grow token by token, and of
such tuples. `select` and `follow` apply to every field, so a new kind of state needs no code for them.
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


def select(state: MixerState, order: Tensor) -> MixerState:
    """Row i of the result is row order[i] of `state`; rows may be repeated or left out."""
    return walk(state, lambda t: t.index_select(0, order), lambda cache: cache.select(order))


def follow(state: MixerState, order: Tensor, last: int) -> MixerState:
    """`select` for rows that differ from their replacements only in the `last` tokens.

    Caches copy only those tokens, in place, so `state` must not be used afterwards.
    """
    return walk(state, lambda t: t.index_select(0, order), lambda cache: cache.follow(order, last))


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
