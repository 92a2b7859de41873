"""What token mixers with single-head attention share, such as Mega and GAU: its options, position bias and chunks."""

from dataclasses import dataclass
from functools import partial
from typing import Dict, Optional, Tuple

import torch
from torch import Tensor, nn

from mega_fairseq.modules.config import setting
from mega_fairseq.modules.mixer import ChunkedConfig, ChunkedMixer
from mega_fairseq.modules.position_bias import POSITION_BIASES, check_attention
from mega_fairseq.modules.projection import RELEASED_STD, project
from mega_fairseq.ops.attention import attention
from mega_fairseq.ops.queries_keys import queries_keys


@dataclass(frozen=True)
class SingleHeadConfig(ChunkedConfig):
    """Options of a mixer with single-head attention; subclasses add `attention`, its function."""

    shared_dim: int = setting(0, "width of queries and keys", "{side}_z_dim")  # 0: a quarter of dim
    value_dim: int = setting(0, "width of attention's values", "{side}_hidden_dim")  # 0: twice dim
    position_bias: str = setting(
        "simple", "relative position bias", "rel_pos_bias", choices=POSITION_BIASES
    )  # b_rel of eq. 11
    max_positions: int = setting(1024, "reach of position bias simple without chunks")
    attention_dropout: float = setting(0.0, "dropout on attention weights", "attention_dropout")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.set_default("shared_dim", self.dim // 4)
        self.set_default("value_dim", 2 * self.dim)
        check_attention(self)
        self.check_positive("value_dim")


class SingleHeadMixer(ChunkedMixer):
    """A mixer with attention in chunks and a `position_bias`, which limits the chunk size if it is a table."""

    outer_scale = False  # see `attention`

    def add_attention(self, scales: int) -> None:
        """Adds kappa and mu, with a row for each use of Z (0 are queries, 1 keys), and the position bias."""
        c = self.config
        self.kappa = nn.Parameter(torch.ones(scales, c.shared_dim))
        self.mu = nn.Parameter(torch.zeros(scales, c.shared_dim))
        if c.init == "released":
            nn.init.normal_(self.kappa, 0.0, RELEASED_STD)
        self.position_bias = POSITION_BIASES[c.position_bias](c.shared_dim, c.chunk_size or c.max_positions, c.causal)

    def queries_keys(self, x: Tensor) -> Tuple[Tensor, Tensor]:
        """kappa_i * Z + mu_i with Z = silu(shared(x)) (Mega's eq. 7-9): (B, L, z) each."""
        return queries_keys(project(self.shared, x), self.kappa, self.mu)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, padding: Optional[Tensor]) -> Tensor:
        """f(Q K^T / tau + b_rel) V (eq. 11) within groups, with the last query at the position of the last key."""
        c, dropout = self.config, self.dropout_module.rate(self.config.attention_dropout)
        q, k, bias = self.position_bias.positioned(q, k, k.size(1) - q.size(1))
        return attention(q, k, v, c.attention, c.causal, bias, padding, dropout, outer=self.outer_scale)

    @property
    def longest(self) -> Optional[int]:
        return None if self.config.chunk_size is not None else self.position_bias.longest

    def with_chunk(self, chunk_size: Optional[int]) -> "SingleHeadMixer":
        learned, whole = self.position_bias.longest, self.config.max_positions
        if learned is not None and not (learned >= whole if chunk_size is None else 0 < chunk_size <= learned):
            raise ValueError(self._beyond(chunk_size, learned))
        return super().with_chunk(chunk_size)

    def adapt(self, stored: Dict[str, Tensor], prefix: str) -> None:
        self.position_bias.adapt(stored, f"{prefix}position_bias.", partial(self._beyond, self.config.chunk_size))

    def _beyond(self, chunk_size: Optional[int], learned: int) -> str:
        c = self.config
        limit = "" if c.chunk_size else f" for up to {c.max_positions} positions"
        return (
            f"{c.name('chunk_size')} is {c.written(chunk_size)}{limit} and this model's position bias 'simple' reaches "
            f"{learned} tokens; evaluate at chunks of 1 to {learned}, or train with {c.name('position_bias')} rotary"
        )
