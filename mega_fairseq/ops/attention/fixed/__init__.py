"""Keys and values in storage of a fixed size, so that every step takes the same operations, as a CUDA graph needs.

Positions are tensors there: a graph would repeat a Python number at every step. When beams continue others, keys and
values stay where they are: a table tells in which row each position of a row is.

On NVIDIA GPUs, `triton.attend` appends and attends in one kernel. It equals `FixedKeyValues.append`, followed by the
usual attention at one position.
"""

from typing import NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from mega_fairseq.ops.backend import TRITON, backend


class FixedPlace(NamedTuple):
    """A position below `limit`. The owner of `number` and `rows` advances them, for all layers at once."""

    number: Tensor  # () int64
    limit: int
    rows: Tensor  # (R, limit) int64, which row has the keys and values of each position of a row

    def advance_rows(self, order: Tensor, rows: Tensor) -> None:
        """Replaces row i by row order[i]; the next token of each row will be in its own row, rows (R,)."""
        self.rows.copy_(self.rows.index_select(0, order))
        self.rows.index_copy_(1, self.number.view(1), rows.unsqueeze(1))


class FixedKeyValues(NamedTuple):
    """The counterpart of `KeyValues` for single tokens; places after `last` contain no keys yet."""

    keys: Tensor  # (R, capacity, z)
    values: Tensor  # (R, capacity, e)
    last: FixedPlace  # of the next token, and of the newest one once it is appended

    @property
    def place(self) -> Tensor:
        """The place of the next token, () int64."""
        return self.last.number

    @property
    def padding(self) -> Tensor:
        """(1, capacity) bool, True = unused, once the token is appended."""
        return (torch.arange(self.keys.size(1), device=self.keys.device) > self.last.number).unsqueeze(0)

    def append(self, keys: Tensor, values: Tensor, chunk_size: Optional[int]) -> "FixedKeyValues":
        """Stores the next token's (R, 1, .); returns a copy in which each row has its own keys and values."""
        index = self.last.number.view(1)
        self.keys.index_copy_(1, index, keys)
        self.values.index_copy_(1, index, values)
        return FixedKeyValues(*self.of_rows(), self.last)

    def of_rows(self) -> Tuple[Tensor, Tensor]:
        """The keys and values of each row at each position: copies."""
        positions = torch.arange(self.keys.size(1), device=self.keys.device)
        return self.keys[self.last.rows, positions], self.values[self.last.rows, positions]

    def unless_complete(self, chunk_size: Optional[int]) -> "FixedKeyValues":
        """Itself: after a complete chunk, `last` is 0, and its keys are overwritten."""
        return self


def kernel_runs(q: Tensor) -> bool:
    """Whether triton.py has a kernel for these queries."""
    return not torch.is_grad_enabled() and backend(q.device) == TRITON
