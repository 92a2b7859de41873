"""Keys and values in storage of a fixed size, so that every step takes the same operations, as a CUDA graph needs.

Positions are tensors there: a graph would repeat a Python number at every step.
"""

from typing import NamedTuple, Optional

import torch
from torch import Tensor


class FixedPlace(NamedTuple):
    """A position below `limit`. The owner of `number` advances it after all layers."""

    number: Tensor  # () int64
    limit: int

    def __add__(self, tokens: int) -> "FixedPlace":
        return self


class FixedKeyValues(NamedTuple):
    """The counterpart of `KeyValues` for single tokens; places after `last` contain no keys yet."""

    keys: Tensor  # (R, capacity, z)
    values: Tensor  # (R, capacity, e)
    last: FixedPlace  # of the next token, and of the newest one once it is appended

    @property
    def padding(self) -> Tensor:
        """(1, capacity) bool, True = unused, once the token is appended."""
        return (torch.arange(self.keys.size(1), device=self.keys.device) > self.last.number).unsqueeze(0)

    def append(self, keys: Tensor, values: Tensor, chunk_size: Optional[int]) -> "FixedKeyValues":
        index = self.last.number.view(1)
        self.keys.index_copy_(1, index, keys)
        self.values.index_copy_(1, index, values)
        return self

    def unless_complete(self, chunk_size: Optional[int]) -> "FixedKeyValues":
        """Itself: after a complete chunk, `last` is 0, and its keys are overwritten."""
        return self
