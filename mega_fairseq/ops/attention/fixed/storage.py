"""Keys and values in storage of a fixed size, and positions that are tensors."""

from typing import NamedTuple, Optional, Tuple

import torch
from torch import Tensor


class FixedPlace(NamedTuple):
    """A position below `limit`. The owner of `number` and `rows` advances them, for all layers at once."""

    number: Tensor  # () int64
    limit: int
    rows: Tensor  # (R, limit) int64, which row has the keys and values of each position of a row

    def advance_rows(self, order: Tensor, rows: Tensor) -> None:
        """Replaces row i by row order[i]; the next token of each row will be in its own row, rows (R,)."""
        self.rows.copy_(self.rows.index_select(0, order))
        self.rows.index_copy_(1, self.number.view(1), rows.unsqueeze(1))

    def bias(self, table: Tensor, keys: int) -> Tensor:
        """From biases for the distances from 1 - limit on, those of a query here and keys at 0, 1, ...: (keys,)."""
        places = torch.arange(keys, device=table.device)
        return table.index_select(0, places + (self.limit - 1 - self.number.view(1)))


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
