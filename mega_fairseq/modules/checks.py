"""Checks of the inputs of modules, with errors of one sentence."""

from typing import Optional, Sequence, Union

import torch
from torch import Tensor

from mega_fairseq.ops.padding import Alignment, Padding
from mega_fairseq.ops.precision import autocast_dtype


def check_sequence(name: str, x: Tensor, dim: int, parameter: Optional[Tensor]) -> None:
    """Checks that x is (B, L, dim) in the dtype of the module's parameters (autocast casts both).

    FSDP and the replicas of nn.DataParallel have no parameters of their own: then any dtype is accepted.
    """
    if x.dim() != 3 or x.size(-1) != dim or 0 in x.shape[:2]:
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}; it must be (batch, length, {dim}) with batch and length at least 1"
        )
    if parameter is None:
        return
    if x.dtype != parameter.dtype and (autocast_dtype(x.device.type) is None or not x.is_floating_point()):
        raise TypeError(f"{name} has dtype {x.dtype}; it must be {parameter.dtype} like the parameters")


def check_padding_mask(mask: Optional[Padding], x: Tensor, name: str = "padding_mask") -> None:
    if mask is None:
        return
    if isinstance(mask, Alignment):
        if mask.width != x.size(1) or mask.lengths.size(0) != x.size(0) or mask.order is not None:
            raise ValueError(
                f"{name} is an alignment of {mask.lengths.size(0)} sequences up to {mask.width} and x has shape "
                f"{tuple(x.shape)}; give align.done() with align.front(x)"
            )
        return
    if not isinstance(mask, Tensor):
        raise TypeError(f"{name} is a {type(mask).__name__}; it must be a bool tensor with True at padding")
    if mask.dtype != torch.bool:
        raise TypeError(f"{name} has dtype {mask.dtype}; it must be bool with True at padding")
    if mask.shape != x.shape[:2]:
        raise ValueError(f"{name} has shape {tuple(mask.shape)}; it must be (batch, length) = {tuple(x.shape[:2])}")


def check_state_type(state: object, kind: type) -> None:
    if state is not None and not isinstance(state, kind):
        raise TypeError(
            f"state is a {type(state).__name__}; it must be the {kind.__name__} that the last call returned "
            "(give masks as padding_mask)"
        )


def check_state_shape(name: str, state: Tensor, expected: Sequence[Union[int, str]]) -> None:
    """Numbers in `expected` must match; a word matches any size."""
    sizes = tuple(state.shape)
    if len(sizes) != len(expected) or any(e != s for e, s in zip(expected, sizes) if not isinstance(e, str)):
        wanted = ", ".join(map(str, expected))
        raise ValueError(
            f"{name} has shape {sizes}; it must be ({wanted}): continue with the same sequences and the same module"
        )
