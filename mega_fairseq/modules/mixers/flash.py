"""FLASH, mixed chunk attention (Hua et al. 2022): GAU inside chunks, and linear attention to finished chunks."""

from dataclasses import dataclass
from typing import Dict, NamedTuple, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mega_fairseq.modules.mixer import Batch, MixerStep
from mega_fairseq.modules.mixer_state import Shape
from mega_fairseq.modules.mixers.gau import GatedAttentionUnit, GAUConfig
from mega_fairseq.modules.position_bias import TabledBias, biased_weights
from mega_fairseq.modules.projection import packed, project, project_gated
from mega_fairseq.ops.attention import weighted_sum
from mega_fairseq.ops.attention.chunks import KeyValues, chunked, join
from mega_fairseq.ops.linear_attention import Memory, chunk_memory, whole_memory
from mega_fairseq.ops.precision import at_least_float32

QUAD_QUERIES, QUAD_KEYS, LINEAR_QUERIES, LINEAR_KEYS = range(4)  # rows of kappa and mu


@dataclass(frozen=True)
class FlashConfig(GAUConfig):
    """Options of mixed chunk attention."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chunk_size is None:
            raise ValueError(
                f"{self.name('chunk_size')} is {self.written(None)} and FLASH attends in chunks; "
                "give a number of tokens, such as 256"
            )

    def build(self) -> "MixedChunkAttention":
        return MixedChunkAttention(self)


EXAMPLES = {
    "flash": FlashConfig(4, shared_dim=2, value_dim=6, chunk_size=6, position_bias="rope"),
    "flash, laplace": FlashConfig(4, shared_dim=2, value_dim=6, chunk_size=6, attention="laplace", token_shift=True),
}


class FlashState(NamedTuple):
    """The unfinished chunk and what is left of the finished ones."""

    cache: KeyValues  # Z (B, m, s), of which both kinds of keys are made, and V (B, m, e)
    memory: Tensor  # (B, s, e) sum of k (outer) v over finished chunks, in float32 or better
    finished: Tensor  # (B,) number of tokens in these chunks


class MixedChunkAttention(GatedAttentionUnit):
    """M(X) = (U * (quad + lin)) W_o + b_o: quad is GAU's attention in a token's chunk, lin reads the memory."""

    State = FlashState
    fixed_step = False  # it does more at the end of a chunk
    SCALES = 4

    def __init__(self, config: FlashConfig):
        super().__init__(config)
        if config.init == "scaled":  # lin has no 1 / sqrt(s) of its own
            nn.init.constant_(self.kappa[LINEAR_QUERIES:], config.shared_dim**-0.5)

    def mix(self, x: Tensor, batch: Batch) -> Tuple[Tensor, Optional[FlashState]]:
        values = self.drop(project(self.values, x, "silu"), self.config.hidden_dropout)  # V (B, L, e)
        shared = project(self.shared, x, "silu")  # Z (B, L, s)
        mixed, state = (self._causal if self.config.causal else self._bidirectional)(shared, values, batch)
        return project_gated(self.gate, self.output, x, mixed, "silu"), state

    def _causal(self, shared: Tensor, values: Tensor, batch: Batch) -> Tuple[Tensor, FlashState]:
        chunk_size = self.config.chunk_size
        cache, *memory = batch.state or self.first_state(values)
        memory = Memory(*memory)
        joined = join(shared, shared, values, chunk_size, cache, batch.lengths)
        quad = chunked(self.attend, joined.q, joined.k, joined.v, chunk_size)

        places = memory.tokens.unsqueeze(1) + torch.arange(joined.k.size(1), device=values.device)  # (B, m), absolute
        queries, keys = self.linear_maps(joined.k, places)
        queries = queries[:, -joined.q.size(1) :]
        lin, memory = chunk_memory(queries, keys, joined.v, chunk_size, memory, joined.lengths)
        return joined.outputs(quad + lin), FlashState(joined.rest(chunk_size), *memory)

    def _bidirectional(self, shared: Tensor, values: Tensor, batch: Batch) -> Tuple[Tensor, None]:
        quad = chunked(self.attend, shared, shared, values, self.config.chunk_size, batch.padding)
        places = torch.arange(shared.size(1), device=shared.device)
        return quad + whole_memory(*self.linear_maps(shared, places), values, batch.padding), None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, padding: Optional[Tensor]) -> Tensor:
        return super().attend(self.scaled(q, QUAD_QUERIES), self.scaled(k, QUAD_KEYS), v, padding)

    def scaled(self, shared: Tensor, row: int) -> Tensor:
        """kappa_i * Z + mu_i for one use of Z: (B, L, s)."""
        return torch.addcmul(self.mu[row], shared, self.kappa[row])

    def linear_maps(self, shared: Tensor, places: Tensor) -> Tensor:
        """Queries and keys of the linear part, at absolute places if the position bias rotates: (2, B, L, s)."""
        both = torch.stack([self.scaled(shared, row) for row in (LINEAR_QUERIES, LINEAR_KEYS)])
        return self.position_bias.rotate(both, places)

    def first_state(self, x: Tensor) -> FlashState:
        """The state before the first token of x (B, L, .)."""
        c, batch = self.config, x.size(0)
        memory = x.new_zeros(batch, c.shared_dim, c.value_dim, dtype=at_least_float32(x.dtype))
        return FlashState(None, memory, torch.zeros(batch, dtype=torch.long, device=x.device))

    def state_shapes(self) -> Dict[str, Shape]:
        c = self.config
        return {**super().state_shapes(), "memory": (c.shared_dim, c.value_dim), "finished": ()}

    def step(self) -> MixerStep:
        """The mixer for one token, with one projection for U, V and Z."""
        c, position_bias, outer = self.config, TabledBias(self.position_bias), self.outer_scale
        project, output = packed(self.gate, self.values, self.shared), packed(self.output)
        widths = (c.value_dim, c.value_dim, c.shared_dim)

        def mix(x: Tensor, residual: Tensor, state: FlashState) -> Tuple[Tensor, FlashState]:
            cache, memory, finished = state
            gate, values, shared = F.silu(project(x)).unsqueeze(1).split(widths, -1)  # (R, 1, .)
            cache = cache.append(shared, values, c.chunk_size)
            place = cache.keys.size(1) - 1
            queries, keys = self.scaled(shared, QUAD_QUERIES), self.scaled(cache.keys, QUAD_KEYS)
            weights = biased_weights(queries, keys, position_bias, place, c.attention, outer=outer)
            lin_queries, _ = self.linear_maps(shared, (finished + place).unsqueeze(1))
            lin = torch.bmm(lin_queries.to(memory.dtype), memory) / finished.clamp_min(1).view(-1, 1, 1)
            y = output((gate * (weighted_sum(weights, cache.values) + lin.to(values.dtype))).squeeze(1))

            if place + 1 == c.chunk_size:
                places = finished.unsqueeze(1) + torch.arange(c.chunk_size, device=x.device)
                _, keys = self.linear_maps(cache.keys, places)
                memory = memory + torch.bmm(keys.to(memory.dtype).transpose(1, 2), cache.values.to(memory.dtype))
                finished = finished + c.chunk_size
            return y, FlashState(cache.unless_complete(c.chunk_size), memory, finished)

        return MixerStep(self, mix)
