"""Layers that torch's compiler has compiled, for training."""

import logging
from functools import lru_cache, partial
from typing import Any, Callable

import torch
from torch import nn

logger = logging.getLogger(__name__)


def compiled(layer: nn.Module) -> Callable[..., Any]:
    """In training, what the compiler makes of a layer: once for all layers of the same kind."""
    weight = next(layer.parameters())
    possible = layer.training and _can_compile(weight.device.type, weight.dtype)
    return partial(_compiled(), layer) if possible else layer


@lru_cache(maxsize=None)  # so that it warns once
def _can_compile(device_type: str, dtype: torch.dtype) -> bool:
    """Not half precision on CPUs: gradients of code that the compiler of torch 2.13 vectorises are NaN there."""
    possible = device_type != "cpu" or dtype in (torch.float32, torch.float64)
    if not possible:
        logger.warning("--compile has no effect in half precision on CPUs, where torch's compiler has wrong gradients")
    return possible


@lru_cache(maxsize=None)
def _compiled() -> Callable[..., Any]:
    return torch.compile(_call)


def _call(layer: nn.Module, *inputs: Any, **options: Any) -> Any:
    return layer(*inputs, **options)
