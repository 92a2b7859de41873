"""The precision that operators compute in."""

from contextlib import AbstractContextManager, nullcontext
from typing import Optional

import torch
from torch import Tensor

from mega_fairseq.ops.backend import on_cpu

WITHOUT_FLOAT64 = ("mps",)  # types of devices
AUTOCAST = ("cpu", "cuda")  # types of devices that layers run on with autocast


def widest(device: torch.device) -> torch.dtype:
    """The dtype for angles and statistics of long sequences: float64, or float32 on Apple's GPUs, which lack it."""
    return torch.float32 if device.type in WITHOUT_FLOAT64 else torch.float64


def autocast_is_on(device_type: str) -> bool:
    return device_type in AUTOCAST and torch.is_autocast_enabled(device_type)


def autocast_dtype(x: Tensor) -> Optional[torch.dtype]:
    """Autocast's dtype on the device of x, or None if autocast is off."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if autocast_is_on(kind) else None


def cast_dtype(x: Tensor) -> torch.dtype:
    """The dtype that autocast gives to x; like torch, it leaves float64 alone."""
    return x.dtype if x.dtype == torch.float64 else autocast_dtype(x) or x.dtype


def without_autocast(x: Tensor) -> AbstractContextManager:
    """A context without autocast, for operators that choose their own precision."""
    if autocast_dtype(x) is None:
        return nullcontext()
    return torch.autocast(device_type=x.device.type, enabled=False)


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """float32, or a wider or complex dtype as it is."""
    return torch.promote_types(dtype, torch.float32)


def sums_in_half(x: Tensor) -> bool:
    """Whether torch's kernels would sum gradients in x's dtype, float16 or bfloat16, as they do on the CPU.

    In bfloat16 such a sum stops growing after a few hundred terms.
    """
    return on_cpu(x) and x.dtype != at_least_float32(x.dtype) and torch.is_grad_enabled()


def product_dtype(x: Tensor, dtype: torch.dtype) -> torch.dtype:
    """The dtype to multiply matrices of `dtype` in, on the device of x.

    float16 becomes float32 on the CPU, where torch's float16 products are five to sixty times slower.
    """
    return torch.float32 if dtype == torch.float16 and on_cpu(x) else dtype
