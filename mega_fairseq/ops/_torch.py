"""The few places where torch's own interface changed between the versions that we support."""

from contextlib import contextmanager
from typing import Iterator, Optional

import torch
from torch import Tensor


def is_compiling() -> bool:
    """True while torch.compile or torch.export traces: then plain forms run and the compiler does the fusing."""
    compiler = getattr(torch, "compiler", None)
    if hasattr(compiler, "is_compiling"):
        return compiler.is_compiling()
    return torch._dynamo.is_compiling() if hasattr(torch, "_dynamo") else False


def autocast_dtype(device_type: str) -> Optional[torch.dtype]:
    """The dtype that autocast asks for on this kind of device, or None where autocast is off."""
    if device_type not in ("cpu", "cuda"):
        return None
    try:
        return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
    except (AttributeError, TypeError):  # torch < 2.4 asks without a device
        if device_type == "cuda":
            return torch.get_autocast_gpu_dtype() if torch.is_autocast_enabled() else None
        return torch.get_autocast_cpu_dtype() if torch.is_autocast_cpu_enabled() else None


@contextmanager
def _autocast_off(device_type: str) -> Iterator[None]:
    with torch.autocast(device_type=device_type, enabled=False):
        yield


@contextmanager
def _unchanged() -> Iterator[None]:
    yield


def without_autocast(x: Tensor):
    """Context in which matrix products keep the dtype they are given (our ops choose their own precision)."""
    return _autocast_off(x.device.type) if autocast_dtype(x.device.type) is not None else _unchanged()
