"""Gated attention unit (Hua et al. 2022, Transformer Quality in Linear Time); FLASH-Quad is a stack of them."""

from dataclasses import dataclass
from typing import Dict, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mega_fairseq.modules.config import setting
from mega_fairseq.modules.mixer import Batch, MixerStep
from mega_fairseq.modules.mixer_state import OpenChunk, Shape
from mega_fairseq.modules.position_bias import TabledBias, attend_token
from mega_fairseq.modules.projection import linear, packed, project, project_gated
from mega_fairseq.modules.single_head import SingleHeadConfig, SingleHeadMixer
from mega_fairseq.ops.attention import ATTENTION_FUNCTIONS

SCALES = ("outer", "inner")


@dataclass(frozen=True)
class GAUConfig(SingleHeadConfig):
    """Options of the gated attention unit."""

    attention: str = setting(
        "relu2", "attention function of GAU and FLASH", "{side}_gau_attention_fn", choices=ATTENTION_FUNCTIONS
    )
    # N is the number of keys that a row sees: it streams, sees no future and no pads. The paper's code has n instead.
    scale: str = setting(
        "outer",
        "of relu2: outer is relu2(q k / sqrt(z)) / N, inner relu2(q k / N)",
        "{side}_gau_scale",
        choices=SCALES,
        only_with=("attention", "relu2"),
    )

    def build(self) -> "GatedAttentionUnit":
        return GatedAttentionUnit(self)


EXAMPLES = {
    "gau": GAUConfig(4, shared_dim=2, value_dim=6, chunk_size=6),
    "gau, softmax": GAUConfig(4, shared_dim=4, value_dim=4, chunk_size=6, attention="softmax", position_bias="rope"),
    "gau, unbounded": GAUConfig(4, shared_dim=2, value_dim=6, scale="inner", position_bias="rotary", token_shift=True),
}


class GatedAttentionUnit(SingleHeadMixer):
    """M(X) = (U * (A V)) W_o + b_o, attention and gated feed-forward layer in one."""

    State = OpenChunk
    fixed_step = True
    SCALES = 2  # rows of kappa and mu: queries and keys

    def __init__(self, config: GAUConfig):
        super().__init__(config)
        c = config
        self.gate = linear(c.dim, c.value_dim, c.init)
        self.values = linear(c.dim, c.value_dim, c.init)
        self.shared = linear(c.dim, c.shared_dim, c.init)
        self.output = linear(c.value_dim, c.dim, c.init)
        self.add_attention(self.SCALES)

    @property
    def outer_scale(self) -> bool:
        return self.config.scale == "outer"

    def mix(self, x: Tensor, batch: Batch) -> Tuple[Tensor, Optional[OpenChunk]]:
        values = self.drop(project(self.values, x, "silu"), self.config.hidden_dropout)  # V (B, L, e)
        queries, keys = self.queries_keys(x)  # (B, L, s) each
        attended, state = self.in_open_chunk(self.attend, queries, keys, values, batch)
        return project_gated(self.gate, self.output, x, attended, "silu"), state

    def state_shapes(self) -> Dict[str, Shape]:
        return self.cache_shapes(self.config.shared_dim, self.config.value_dim)

    def step(self) -> MixerStep:
        """The unit for one token, with one projection for U, V and Z."""
        c, position_bias, outer = self.config, TabledBias(self.position_bias), self.outer_scale
        project, output = packed(self.gate, self.values, self.shared), packed(self.output)
        kappa, mu, widths = self.kappa.unsqueeze(1), self.mu.unsqueeze(1), (c.value_dim, c.value_dim, c.shared_dim)

        def mix(x: Tensor, residual: Tensor, state: OpenChunk) -> Tuple[Tensor, OpenChunk]:
            gate, values, shared = F.silu(project(x)).split(widths, -1)
            queries, keys = torch.addcmul(mu, shared, kappa)  # (R, s) each
            args = (state.cache, position_bias, c.attention, c.chunk_size, outer)
            attended, cache = attend_token(queries, keys, values, *args)
            return output(gate * attended), OpenChunk(cache)

        return MixerStep(self, mix)
