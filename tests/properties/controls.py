"""Inputs of the negative controls, and the check that a broken layer is rejected."""

from typing import Any, Callable

import pytest
import torch

from tests.properties.contracts import Layer
from tests.properties.layers import DIM, random_input

X, OTHER = random_input(1, 2, 9, DIM), random_input(2, 2, 9, DIM)
TAILS = random_input(3, 2, 3, DIM)
ROWS = [random_input(4, 7, DIM), random_input(5, 4, DIM)]
LEFT = torch.zeros(2, 7, dtype=torch.bool)
LEFT[1, :3] = True
RIGHT = LEFT.flip(1)


def rejects(check: Callable[..., None], healthy: Layer, twin: Layer, *args: Any, saying: str) -> None:
    check(healthy, *args)
    with pytest.raises(AssertionError, match=saying):
        check(twin, *args)
