"""What every module asks of its tensors, answered in one sentence where it is not so."""

from typing import Optional

import torch
from torch import Tensor


def check_sequence(name: str, x: Tensor, dim: int) -> None:
    if x.dim() != 3 or x.size(-1) != dim or x.size(1) == 0:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; it must be (batch, length, {dim}) with length at least 1")


def check_padding_mask(mask: Optional[Tensor], x: Tensor, name: str = "padding_mask") -> None:
    if mask is None:
        return
    if mask.dtype != torch.bool:
        raise TypeError(f"{name} has dtype {mask.dtype}; it must be bool with True at padding")
    if mask.shape != x.shape[:2]:
        raise ValueError(f"{name} has shape {tuple(mask.shape)}; it must be (batch, length) = {tuple(x.shape[:2])}")


def check_state(state: Optional[object], x: Tensor, batch_of: Optional[Tensor]) -> None:
    if state is not None and batch_of is not None and batch_of.size(0) != x.size(0):
        raise ValueError(f"the state is of {batch_of.size(0)} sequences and the input of {x.size(0)}")
