"""Gated attention unit (Hua et al. 2022, Transformer Quality in Linear Time); FLASH-Quad is a stack of them."""

from dataclasses import dataclass
from typing import Dict, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mega_fairseq.modules.attend import TabledBias, biased_weights
from mega_fairseq.modules.config import setting
from mega_fairseq.modules.mixer import Batch, MixerStep
from mega_fairseq.modules.mixer_state import OpenChunk, Shape
from mega_fairseq.modules.projection import linear, side_by_side
from mega_fairseq.modules.single_head import SingleHeadConfig, SingleHeadMixer, initialize_scales, position_bias
from mega_fairseq.ops.attention import ATTENTION_FUNCTIONS, weighted_sum
from mega_fairseq.ops.dropout import dropped
from mega_fairseq.ops.gates import activated_linear, gated_linear
from mega_fairseq.ops.linear import ready_linear

SCALES = ("outer", "inner")


@dataclass(frozen=True)
class GAUConfig(SingleHeadConfig):
    """Options of the gated attention unit."""

    attention: str = setting(
        "relu2", "attention function of GAU and FLASH", "{side}_gau_attention_fn", choices=ATTENTION_FUNCTIONS
    )
    # N is the number of keys that a row sees: it streams, sees no future and no pads. The paper's code has n instead.
    scale: str = setting(
        "outer", "of relu2: outer is relu2(q k / sqrt(z)) / N, inner relu2(q k / N)", "{side}_gau_scale", choices=SCALES
    )

    ONLY_WITH = {"scale": ("attention", ("relu2",))}

    def build(self) -> "GatedAttentionUnit":
        return GatedAttentionUnit(self)


class GatedAttentionUnit(SingleHeadMixer):
    """M(X) = (U * (A V)) W_o + b_o, attention and gated feed-forward layer in one."""

    State = OpenChunk
    MAPS = 2  # queries and keys

    def __init__(self, config: GAUConfig):
        super().__init__(config)
        c = config
        self.gate = linear(c.dim, c.value_dim, c.init)
        self.values = linear(c.dim, c.value_dim, c.init)
        self.shared = linear(c.dim, c.shared_dim, c.init)
        self.kappa = nn.Parameter(torch.empty(self.MAPS, c.shared_dim))
        self.mu = nn.Parameter(torch.zeros(self.MAPS, c.shared_dim))
        self.output = linear(c.value_dim, c.dim, c.init)
        initialize_scales(self.kappa, c.init)
        self.position_bias = position_bias(c)

    @property
    def outer_scale(self) -> bool:
        return self.config.scale == "outer"

    def mix(self, x: Tensor, batch: Batch) -> Tuple[Tensor, Optional[OpenChunk]]:
        values, shared = self.values_and_shared(x)
        queries, keys = self.mapped(shared)
        attended, state = self.in_open_chunk(self.attend, queries, keys, values, batch)
        return self.gated(x, attended), state

    def gated(self, x: Tensor, attended: Tensor) -> Tensor:
        """(U * O) W_o + b_o: O (B, L, e) -> (B, L, D)."""
        gate, output = (self.gate.weight, self.gate.bias), (self.output.weight, self.output.bias)
        return gated_linear(x, attended, gate, output)

    def values_and_shared(self, x: Tensor) -> Tuple[Tensor, Tensor]:
        """V (B, L, e) and Z (B, L, s)."""
        c = self.config
        values = activated_linear(x, self.values.weight, self.values.bias)
        values = dropped(values, self.rate(c.hidden_dropout), c.feature_dropout)
        return values, activated_linear(x, self.shared.weight, self.shared.bias)

    def state_shapes(self) -> Dict[str, Shape]:
        return self.cache_shapes(self.config.shared_dim, self.config.value_dim)

    def step(self) -> MixerStep:
        return GAUStep(self)


class GAUStep(MixerStep):
    """The unit for one token, with one projection for U, V and Z."""

    def __init__(self, module: GatedAttentionUnit):
        super().__init__(module)
        c = self.config
        self.kappa, self.mu = module.kappa.unsqueeze(1), module.mu.unsqueeze(1)
        self.projection = side_by_side(module.gate, module.values, module.shared)
        self.widths = (c.value_dim, c.value_dim, c.shared_dim)
        self.output = ready_linear(module.output.weight, module.output.bias)
        self.position_bias, self.outer_scale = TabledBias(module.position_bias), module.outer_scale

    def mix(self, x: Tensor, residual: Tensor, state: OpenChunk) -> Tuple[Tensor, OpenChunk]:
        c = self.config
        gate, values, shared = F.silu(self.projection(x)).split(self.widths, -1)
        queries, keys = torch.addcmul(self.mu, shared, self.kappa).unsqueeze(2)  # (R, 1, s) each
        cache = state.cache.append(keys, values.unsqueeze(1), c.chunk_size)
        place = cache.keys.size(1) - 1
        weights = biased_weights(queries, cache.keys, self.position_bias, place, c.attention, outer=self.outer_scale)
        y = self.output(gate * weighted_sum(weights, cache.values).squeeze(1))
        return y, OpenChunk(cache.unless_complete(c.chunk_size))
