"""FLASH, mixed chunk attention (Hua et al. 2022): GAU inside chunks, and linear attention to finished chunks."""

from dataclasses import dataclass
from typing import Dict, NamedTuple, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mega_fairseq.modules.attend import biased_weights
from mega_fairseq.modules.description import Description, RunningMemory
from mega_fairseq.modules.mixer import Batch, MixerStep
from mega_fairseq.modules.mixer_state import Shape
from mega_fairseq.modules.mixers.gau import GatedAttentionUnit, GAUConfig, GAUStep
from mega_fairseq.ops.attention import weighted_sum
from mega_fairseq.ops.attention.chunks import KeyValues, chunked, join
from mega_fairseq.ops.linear_attention import Memory, chunk_memory, chunk_memory_of_slice, whole_memory
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


class FlashState(NamedTuple):
    """The unfinished chunk and what is left of the finished ones."""

    cache: KeyValues  # Z (B, m, s), of which both kinds of keys are made, and V (B, m, e)
    memory: Tensor  # (B, s, e) sum of k (outer) v over finished chunks, in float32 or better
    finished: Tensor  # (B,) number of tokens in these chunks


class MixedChunkAttention(GatedAttentionUnit):
    """M(X) = (U * (quad + lin)) W_o + b_o: quad is GAU's attention in a token's chunk, lin reads the memory."""

    State = FlashState
    MAPS = 4

    def __init__(self, config: FlashConfig):
        super().__init__(config)
        if config.init == "scaled":  # lin has no 1 / sqrt(s) of its own
            nn.init.constant_(self.kappa[LINEAR_QUERIES:], config.shared_dim**-0.5)

    def mix(self, x: Tensor, batch: Batch) -> Tuple[Tensor, Optional[FlashState]]:
        values, shared = self.values_and_shared(x)  # V (B, L, e), Z (B, L, s)
        mixed, state = (self._causal if self.config.causal else self._bidirectional)(shared, values, batch)
        return self.gated(x, mixed), state

    def _causal(self, shared: Tensor, values: Tensor, batch: Batch) -> Tuple[Tensor, FlashState]:
        chunk_size = self.config.chunk_size
        cache, *memory = batch.state or self.first_state(values)
        memory, slices = Memory(*memory), batch.slices
        joined = join(shared, shared, values, chunk_size, cache, batch.lengths)
        quad = chunked(self.attend, joined.q, joined.k, joined.v, chunk_size)

        first = memory.tokens if slices is None else memory.tokens + slices.rank * slices.width
        places = first.unsqueeze(1) + torch.arange(joined.k.size(1), device=values.device)  # (B, m), absolute
        queries, keys = self.linear_maps(joined.k, places)
        queries = queries[:, -joined.q.size(1) :]
        if slices is None:
            mixed, memory = chunk_memory(queries, keys, joined.v, chunk_size, memory, joined.lengths, quad)
        else:
            mixed, memory = chunk_memory_of_slice(queries, keys, joined.v, chunk_size, memory, slices, quad)
        return joined.outputs(mixed), FlashState(joined.rest(chunk_size), *memory)

    def _bidirectional(self, shared: Tensor, values: Tensor, batch: Batch) -> Tuple[Tensor, None]:
        quad = chunked(self.attend, shared, shared, values, self.config.chunk_size, batch.padding)
        places = torch.arange(shared.size(1), device=shared.device)
        return quad + whole_memory(*self.linear_maps(shared, places), values, batch.padding), None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, padding: Optional[Tensor]) -> Tensor:
        return super().attend(self.mapped(q, QUAD_QUERIES), self.mapped(k, QUAD_KEYS), v, padding)

    def linear_maps(self, shared: Tensor, places: Tensor) -> Tensor:
        """Queries and keys of the linear part, at absolute places if the position bias rotates: (2, B, L, s)."""
        both = torch.stack([self.mapped(shared, row) for row in (LINEAR_QUERIES, LINEAR_KEYS)])
        return self.position_bias.rotate_at(both, places)

    def first_state(self, values: Tensor) -> FlashState:
        c, batch = self.config, values.size(0)
        memory = values.new_zeros(batch, c.shared_dim, c.value_dim, dtype=at_least_float32(values.dtype))
        return FlashState(None, memory, torch.zeros(batch, dtype=torch.long, device=values.device))

    def state_shapes(self) -> Dict[str, Shape]:
        c = self.config
        return {**super().state_shapes(), "memory": (c.shared_dim, c.value_dim), "finished": ()}

    def step(self) -> MixerStep:
        return FlashStep(self)

    def describe(self, most: int) -> Description:
        if not self.config.causal:
            return super().describe(most)
        return [*super().describe(most), RunningMemory("memory per token", mean_memory)]


def mean_memory(state: FlashState) -> Tensor:
    """M / (g c), which queries read: (B, s, e)."""
    return state.memory / state.finished.clamp_min(1).view(-1, 1, 1)


class FlashStep(GAUStep):
    """The mixer for one token."""

    def __init__(self, module: MixedChunkAttention):
        super().__init__(module)
        self.mapped, self.linear_maps = module.mapped, module.linear_maps

    def mix(self, x: Tensor, residual: Tensor, state: FlashState) -> Tuple[Tensor, FlashState]:
        c, (cache, memory, finished) = self.config, state
        gate, values, shared = F.silu(self.projection(x)).unsqueeze(1).split(self.widths, -1)  # (R, 1, .)
        cache = cache.append(shared, values, c.chunk_size)
        place = cache.keys.size(1) - 1
        weights = biased_weights(
            self.mapped(shared, QUAD_QUERIES),
            self.mapped(cache.keys, QUAD_KEYS),
            self.position_bias,
            place,
            c.attention,
            outer=self.outer_scale,
        )
        lin_queries, _ = self.linear_maps(shared, (finished + place).unsqueeze(1))
        lin = torch.bmm(lin_queries.to(memory.dtype), memory) / finished.clamp_min(1).view(-1, 1, 1)
        y = self.output((gate * (weighted_sum(weights, cache.values) + lin.to(values.dtype))).squeeze(1))

        if place + 1 == c.chunk_size:
            places = finished.unsqueeze(1) + torch.arange(c.chunk_size, device=x.device)
            _, keys = self.linear_maps(cache.keys, places)
            memory = memory + torch.bmm(keys.to(memory.dtype).transpose(1, 2), cache.values.to(memory.dtype))
            finished = finished + c.chunk_size
        return y, FlashState(cache.unless_complete(c.chunk_size), memory, finished)
