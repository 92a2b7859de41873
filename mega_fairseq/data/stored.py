"""Tensors and numbers in files that are not trusted."""

import numpy as np
import torch
from torch import Tensor


def is_stored(tensor: Tensor) -> bool:
    """Whether each entry is stored: the tensor is not sparse, on the meta device, or an expanded view."""
    if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
        return False
    return tensor.numel() * tensor.element_size() <= tensor.untyped_storage().nbytes()


def numbers_in(line: bytes, dtype: type) -> np.ndarray:
    """The words of a line as numbers; ValueError or OverflowError if they are not. Python's 1_000 is not one."""
    if b"_" in line:
        raise ValueError("a number has an underscore")
    return np.array(line.split(), dtype=dtype)
