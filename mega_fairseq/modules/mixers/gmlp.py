"""gMLP (Liu et al. 2021): tokens are mixed by learned weights of places, with the time weighting of RWKV."""

from dataclasses import dataclass
from typing import Dict, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mega_fairseq.modules.config import setting
from mega_fairseq.modules.mixer import Batch, MixerStep
from mega_fairseq.modules.mixer_state import OpenChunk, Shape
from mega_fairseq.modules.normalization import LayerNorm
from mega_fairseq.modules.projection import linear, packed, project, project_gated
from mega_fairseq.modules.time_tables import TimeConfig, TimeMixer, by_distance, curves
from mega_fairseq.ops.attention.one_position import weighted_sum_by_head
from mega_fairseq.ops.toeplitz import toeplitz

SMALL = 1e-3  # times 1 / T: the first weights beside a spatial bias of 1, so that training starts without mixing


@dataclass(frozen=True)
class GatedMLPConfig(TimeConfig):
    """Options of gMLP. `value_norm` and `spatial_bias` together are the paper's spatial gating unit."""

    expansion: int = setting(2, "width of gMLP's gate and values, in widths of the model", "{side}_gmlp_expansion")
    alpha: bool = setting(False, "learned weight of each place of a query in its chunk", "{side}_time_alpha")
    value_norm: bool = setting(False, "normalise gMLP's values", "{side}_gmlp_value_norm")
    spatial_bias: bool = setting(False, "learned bias of each position in gMLP", "{side}_gmlp_spatial_bias")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_positive("expansion")
        self.check_heads(self.width, f"width of gMLP's values, {self.name('expansion')} times the model's")

    @property
    def width(self) -> int:
        """The width of the gate and of the values."""
        return self.expansion * self.dim

    def build(self) -> "GatedMLP":
        return GatedMLP(self)


EXAMPLES = {
    "gmlp": GatedMLPConfig(4, heads=2, chunk_size=6, alpha=True, beta=True, gamma=True),
    "gmlp, paper": GatedMLPConfig(4, heads=2, chunk_size=6, value_norm=True, spatial_bias=True, token_shift=True),
}


class GatedMLP(TimeMixer):
    """M(X) = (gamma * R * (W V + c)) W_o + b_o with W_tu = f(t - u) alpha(t) beta(u), per head."""

    State = OpenChunk

    def __init__(self, config: GatedMLPConfig):
        super().__init__(config)
        c = config
        self.receptance, self.value = (linear(c.dim, c.width, c.init) for _ in range(2))  # R, V
        self.output = linear(c.width, c.dim, c.init)
        self.value_norm = LayerNorm(c.width) if c.value_norm else None
        self.time_weight = nn.Parameter(torch.softmax(curves(c, c.chunk_size), -1))  # (H, T) or (H, 2 T - 1)
        if c.spatial_bias:
            nn.init.uniform_(self.time_weight, -SMALL / c.chunk_size, SMALL / c.chunk_size)
        self.alpha, self.beta = self.learned_table(c.alpha), self.learned_table(c.beta)
        self.gamma = nn.Parameter(torch.ones(c.chunk_size)) if c.gamma else None
        self.spatial_bias = self.learned_table(c.spatial_bias)

    def mix(self, x: Tensor, batch: Batch) -> Tuple[Tensor, Optional[OpenChunk]]:
        values = project(self.value, x, "gelu")  # (B, L, E d)
        if self.value_norm is not None:
            values = self.value_norm(values)
        values = self.drop(values, self.config.hidden_dropout)
        none = values[..., :0]  # no queries, no keys
        mixed, state = self.in_open_chunk(self.attend, none, none, values, batch)
        return project_gated(self.receptance, self.output, x, mixed, "gelu"), state

    def attend(self, q: Tensor, k: Tensor, v: Tensor, padding: Optional[Tensor]) -> Tensor:
        """gamma * (W V + c) within chunks, for the last places: v (G, m, E d) -> (G, n, E d)."""
        if padding is not None:
            v = v.masked_fill(padding.unsqueeze(-1), 0.0)
        return toeplitz(v, *self.tables(q.size(1), v.size(1)), self.config.causal)

    def tables(self, queries: int, keys: int) -> Tuple[Optional[Tensor], ...]:
        """For the last n of m places, weights by distance (H, n + m - 1), rows (H, n), keys (H, m) and bias (H, n)."""
        rows, bias = (self.at(t, slice(keys - queries, keys)) for t in (self.alpha, self.spatial_bias))
        if self.gamma is not None:
            gamma = self.gamma[keys - queries : keys].expand(self.config.heads, -1)
            rows = gamma if rows is None else gamma * rows
            bias = None if bias is None else gamma * bias
        weight = by_distance(self.time_weight, self.config.causal, queries, keys)
        return weight, rows, self.at(self.beta, slice(0, keys)), bias

    def state_shapes(self) -> Dict[str, Shape]:
        return self.cache_shapes(0, self.config.width)

    def step(self) -> MixerStep:
        """gMLP for one token: the last row of a Toeplitz matrix, which reads the values of the chunk once."""
        c, project, output = self.config, packed(self.receptance, self.value), packed(self.output)

        def mix(x: Tensor, residual: Tensor, state: OpenChunk) -> Tuple[Tensor, OpenChunk]:
            gate, values = F.gelu(project(x)).chunk(2, -1)  # (R, E d) each
            if self.value_norm is not None:
                values = self.value_norm(values)
            values = values.unsqueeze(1)
            cache = state.cache.append(values[..., :0], values, c.chunk_size)
            weight, rows, keys, bias = self.tables(1, cache.values.size(1))
            for factor in (rows, keys):
                weight = weight if factor is None else weight * factor  # (H, m)
            mixed = weighted_sum_by_head(weight, cache.values)
            if bias is not None:
                mixed = mixed + bias.repeat_interleave(c.width // c.heads)
            return output(gate * mixed), OpenChunk(cache.unless_complete(c.chunk_size))

        return MixerStep(self, mix)
