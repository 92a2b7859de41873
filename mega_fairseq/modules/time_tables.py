"""Learned tables over the places of a window: w(t - u), alpha(t), beta(u), gamma(t) (the time weighting of RWKV).

Attention with time weighting, gMLP and AFT share them. A place is counted from the start of its chunk.
"""

from dataclasses import dataclass
from typing import Optional

import torch
from torch import Tensor, nn

from mega_fairseq.modules.config import setting
from mega_fairseq.modules.mixer import ChunkedConfig, ChunkedMixer

MOST_PLACES = 1_000_000  # larger tables are mistakes that would fill the memory


@dataclass(frozen=True)
class TimeConfig(ChunkedConfig):
    """Options of mixers with heads and tables over the places of a window, which is a chunk."""

    heads: int = setting(8, "number of heads", "{side}_attention_heads")
    beta: bool = setting(False, "learned weight of each place of a key in its chunk", "{side}_time_beta")
    gamma: bool = setting(False, "learned factor of each place of an output in its chunk", "{side}_time_gamma")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tabled and not 0 < (self.chunk_size or 0) <= MOST_PLACES:
            raise ValueError(
                f"{self.name('chunk_size')} is {self.written(self.chunk_size)} and this mixer learns tables over the "
                f"places of a chunk; give a number of tokens, up to {MOST_PLACES:,}"
            )

    @property
    def tabled(self) -> bool:
        """Whether there is any table, so that the chunk size is fixed in training."""
        return True


class TimeMixer(ChunkedMixer):
    """A mixer with tables over the places of a chunk, which do not fit another chunk size."""

    def learned_table(self, learned: bool, value: float = 1.0) -> Optional[nn.Parameter]:
        """A number for each head and place, if learned: (H, T)."""
        return nn.Parameter(torch.full((self.config.heads, self.config.chunk_size), value)) if learned else None

    def at(self, table: Optional[Tensor], places: slice) -> Optional[Tensor]:
        """A part of a table that may be missing: (..., T) -> (..., n)."""
        return None if table is None else table[..., places]

    def with_chunk(self, chunk_size: Optional[int]) -> "TimeMixer":
        c, learned = self.config, self.config.chunk_size
        if c.tabled and chunk_size != learned:
            raise ValueError(
                f"{c.name('chunk_size')} is {c.written(chunk_size)} and this model learned tables over the {learned} "
                f"places of a chunk; evaluate at chunks of {learned}"
            )
        return super().with_chunk(chunk_size)


def curves(config: TimeConfig, reach: int) -> Tensor:
    """w_h(k) = -k T^(-(h+1)/(H-1)), and 0 for the last head (RWKV): (H, T) or (H, 2 T - 1), by t - u."""
    heads = config.heads
    slopes = torch.tensor([reach ** (-(h + 1) / (heads - 1)) for h in range(heads - 1)] + [0.0])
    first = 0 if config.causal else 1 - reach
    return -torch.arange(first, reach).abs() * slopes.unsqueeze(1)


def by_distance(table: Tensor, causal: bool, queries: int, keys: int) -> Tensor:
    """A table over t - u as vectors over key - query, as `attention` takes them: (H, n + m - 1).

    The last query is at the place of the last key.
    """
    zero = 0 if causal else table.size(-1) // 2  # the index of distance 0
    future = max(0, queries - 1) if not causal else 0
    part = table[:, max(0, zero - future) : zero + keys].flip(-1)  # t - u = keys - 1 .. -future
    missing = queries - 1 - future
    return part if missing == 0 else torch.cat([part, part.new_zeros(part.size(0), missing)], -1)
