"""Checks that a model's numbers are finite."""

import torch
from torch import Tensor

DIVERGED = (
    "the model gives probabilities that are not finite (NaN or infinity): its training has diverged; take an earlier "
    "checkpoint, and train with a smaller --lr"
)


def check_numbers(log_probs: Tensor) -> None:
    """Raises an error where fairseq would report NaN or infinity as the loss, or ignore the tokens that cause it."""
    if not are_finite(log_probs):
        raise FloatingPointError(DIVERGED)


def are_finite(numbers: Tensor) -> bool:
    return bool(numbers.sum(dtype=torch.float32).isfinite())
