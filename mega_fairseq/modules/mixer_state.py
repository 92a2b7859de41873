"""States of token mixers.

A state is a value: a NamedTuple of batch-first tensors, of `KeyValues` for tensors that grow token by token, and of
such tuples. `select` and `follow` apply to every field, so a new kind of state needs no code for them.
"""

from typing import Any, Callable, NamedTuple, Optional, Tuple, Union

from torch import Tensor

from mega_fairseq.modules.checks import check_state_shape
from mega_fairseq.ops.attention.chunks import KeyValues
from mega_fairseq.ops.sequence_parallel import Slices

MixerState = Tuple[Any, ...]  # each mixer has its own NamedTuple
Shape = Tuple[Union[int, str], ...]  # a word matches any size


class Shifted(NamedTuple):
    """The state of a mixer with token shift."""

    last: Tensor  # (B, floor(D / 2)) of each row's last real token
    mixer: MixerState


class Sliced(NamedTuple):
    """What precedes this process's slice: the slices of the processes before it, and a state before all slices.

    A layer that gets it returns the state after all slices, which is only valid if all have full width.
    """

    slices: Slices
    state: Optional[Any] = None  # the same in all processes


class OpenChunk(NamedTuple):
    """The state of a mixer that remembers only the unfinished chunk."""

    cache: KeyValues


def select(state: MixerState, order: Tensor) -> MixerState:
    """Row i of the result is row order[i] of `state`; rows may be repeated or left out."""
    return _walk(state, lambda t: t.index_select(0, order), lambda cache: cache.select(order))


def follow(state: MixerState, order: Tensor, last: int) -> MixerState:
    """`select` for rows that differ from their replacements only in the `last` tokens.

    Caches copy only those tokens, in place, so `state` must not be used afterwards.
    """
    return _walk(state, lambda t: t.index_select(0, order), lambda cache: cache.follow(order, last))


def batch_size(state: MixerState) -> int:
    """The number of rows of a state."""
    first = state[0]
    return first.size(0) if isinstance(first, Tensor) else batch_size(first)


def _walk(part: Any, on_tensor: Callable[[Tensor], Tensor], on_cache: Callable[[KeyValues], KeyValues]) -> Any:
    if isinstance(part, Tensor):
        return on_tensor(part)
    if isinstance(part, KeyValues):
        return on_cache(part)
    if isinstance(part, tuple):
        return type(part)(*(_walk(field, on_tensor, on_cache) for field in part))
    return part


def tensor_at(state: MixerState, path: str) -> Tensor:
    """The tensor at a path such as "cache.keys"."""
    for name in path.split("."):
        state = getattr(state, name)
    return state


def check_cache(name: str, cache: KeyValues, chunk_size: Optional[int]) -> None:
    """Raises an error for a cache of another chunk size, or whose parts differ in size."""
    keys, values, padding, _ = cache
    check_state_shape(f"{name}.values", values, (*keys.shape[:2], values.size(2)))
    if padding is not None:
        check_state_shape(f"{name}.padding", padding, keys.shape[:2])
    if chunk_size is not None and keys.size(1) >= chunk_size:
        raise ValueError(
            f"{name}.keys has {keys.size(1)} keys and chunk_size is {chunk_size}: an unfinished chunk has up to "
            "chunk_size - 1; use the chunk_size that the state was made with"
        )
