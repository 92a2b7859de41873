"""The attention of the Sparse Transformer (Child et al. 2019): strided and fixed patterns of about sqrt(n) keys."""

from dataclasses import dataclass
from typing import Dict, List, Optional, Tuple

import torch
from torch import Tensor, nn

from mega_fairseq.modules.config import setting
from mega_fairseq.modules.mixer import Batch, ChunkedConfig, ChunkedMixer, MixerStep
from mega_fairseq.modules.mixer_state import MixerState, OpenChunk, Shape
from mega_fairseq.modules.projection import linear, packed, project
from mega_fairseq.ops.attention.chunks import Place
from mega_fairseq.ops.attention.heads import rotate_heads
from mega_fairseq.ops.attention.one_position import attend_at_one_position
from mega_fairseq.ops.sparse import PATTERNS, Sparsity, alike_heads, sparse_attention
from mega_fairseq.ops.sparse.summaries import Summarized, advance, restore, summarize

COMBINATIONS = ("interleaved", "merged", "heads")
INIT_STD = 0.125  # times 1 / sqrt(fan in) (Child et al., section 6)


@dataclass(frozen=True)
class SparseConfig(ChunkedConfig):
    """Options of sparse attention."""

    heads: int = setting(8, "number of heads", "{side}_attention_heads")
    pattern: str = setting(
        "fixed",
        "keys of sparse attention: fixed blocks and their summaries (text), or strided (images, music)",
        "{side}_sparse_pattern",
        choices=PATTERNS,
    )
    stride: int = setting(128, "stride of sparse attention, the size of its blocks", "{side}_sparse_stride")
    summary: int = setting(
        8,
        "positions at the end of a block that later blocks see",
        "{side}_sparse_summary",
        only_with=("pattern", "fixed"),
    )
    subblocks: int = setting(
        1,
        "number of different summaries, of different heads",
        "{side}_sparse_subblocks",
        only_with=("pattern", "fixed"),
    )
    combine: str = setting(
        "merged",
        "how its two sets of keys are combined: interleaved over layers, merged, or split over heads",
        "{side}_sparse_combine",
        choices=COMBINATIONS,
    )
    rotary_dims: int = setting(0, "dimensions of each head that RoPE rotates", "{side}_rotary_dims")
    attention_dropout: float = setting(0.0, "dropout on attention weights", "attention_dropout")
    layer: int = setting(0, "number of this layer, from 0")
    layers: int = setting(1, "number of layers of the model")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_positive("stride", "summary", "subblocks", "layers")
        self.check_heads(self.dim, "width of the model")
        self.check_rotary()
        if self.pattern == "fixed" and self.summary * self.subblocks > self.stride:
            raise ValueError(
                f"{self.name('summary')} is {self.summary} times {self.name('subblocks')} {self.subblocks}, more than "
                f"{self.name('stride')} {self.stride}; summaries cannot be longer than their block"
            )
        if self.subblocks > self.heads:
            raise ValueError(
                f"{self.name('subblocks')} is {self.subblocks}, and each of {self.heads} heads reads one of them; give "
                f"at most {self.heads}"
            )

    @property
    def sparsity(self) -> Sparsity:
        """The places that a query of this layer sees."""
        sets = ("first", "second")[self.layer % 2] if self.combine == "interleaved" else self.combine
        return Sparsity(self.pattern, sets, self.stride, self.causal, self.summary, self.subblocks)

    def build(self) -> "SparseAttention":
        return (SparseAttention if self.pattern == "strided" else FixedAttention)(self)


EXAMPLES = {
    "sparse": SparseConfig(4, heads=2, stride=3, summary=1, chunk_size=6),
    "sparse, subblocks": SparseConfig(4, heads=2, stride=4, summary=1, subblocks=2, combine="heads", rotary_dims=2),
    "sparse, interleaved": SparseConfig(4, heads=2, stride=4, summary=2, combine="interleaved", layer=1, layers=2),
    "sparse, strided": SparseConfig(4, heads=2, pattern="strided", stride=3, rotary_dims=2, token_shift=True),
}


def _projection(c: SparseConfig, residual: bool = False) -> nn.Linear:
    """`released`: N(0, 0.02) as in all mixers. `scaled`: the paper's initialisation, which depends on the depth.

    The feed-forward layer is initialised as beside any other mixer.
    """
    layer = linear(c.dim, c.dim, c.init)
    if c.init == "scaled":
        nn.init.normal_(layer.weight, std=INIT_STD * c.dim**-0.5 / ((2 * c.layers) ** 0.5 if residual else 1.0))
    return layer


class SparseAttention(ChunkedMixer):
    """M(X) = Attention(Q, K, V) W_o + b_o, where each place sees the keys of its sets; the strided pattern."""

    State = OpenChunk  # with all keys of the window, since every column is visited

    def __init__(self, config: SparseConfig):
        super().__init__(config)
        self.query, self.key, self.value = (_projection(config) for _ in range(3))
        self.output = _projection(config, residual=True)

    def mix(self, x: Tensor, batch: Batch) -> Tuple[Tensor, Optional[MixerState]]:
        c = self.config
        q, k, v = (project(layer, x) for layer in (self.query, self.key, self.value))  # (B, L, d) each
        v = self.drop(v, c.hidden_dropout)
        first = 0 if batch.state is None else self.place(batch.state)
        q, k = rotate_heads((q, k), first, c.heads, c.rotary_dims, c.chunk_size)
        out, state = self.mix_values(q, k, v, batch)
        return project(self.output, out), state

    def mix_values(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tuple[Tensor, Optional[MixerState]]:
        """Attention of rotated queries and keys: (B, L, d), and the next state if causal."""
        return self.in_open_chunk(self.attend, q, k, v, batch)

    def place(self, state: MixerState) -> Place:
        """The place in the window of the next token: a number, or (B, 1) if rows are at different places."""
        return state.cache.place

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        padding: Optional[Tensor],
        finished: Optional[Tuple[Tensor, Tensor]] = None,
    ) -> Tensor:
        """Attention within groups (G, n, d), with the last query at the place of the last key."""
        c = self.config
        q, k, v = (t.unflatten(-1, (c.heads, -1)) for t in (q, k, v))  # (G, n, H, z)
        return sparse_attention(
            q, k, v, c.sparsity, padding, self.dropout_module.rate(c.attention_dropout), finished
        ).flatten(2)

    def step(self) -> MixerStep:
        """Sparse attention for one token, which takes its visible keys from the state.

        Rows at different places see different columns; they use `forward`, whose cost grows with the window.
        """
        c, project, output = self.config, packed(self.query, self.key, self.value), packed(self.output)
        classes = alike_heads(c.sparsity, c.heads)

        def mix(x: Tensor, residual: Tensor, state: MixerState) -> Tuple[Tensor, MixerState]:
            place = self.place(state)
            both, v = project(x).unsqueeze(1).split([2 * c.dim, c.dim], -1)
            (both,) = rotate_heads([both], place, 2 * c.heads, c.rotary_dims)
            q, k = both.chunk(2, -1)  # (R, 1, d) each
            state = self.append(state, k, v)
            y = torch.zeros_like(q.view(q.size(0), c.heads, -1))  # (R, H, z)
            for heads, sets, subblock in classes:
                seen = (torch.cat(self.visible(state, t, place, sets, subblock), 1) for t in ("keys", "values"))
                queries, keys, values = (t.unflatten(-1, (c.heads, -1))[:, :, heads] for t in (q, *seen))
                if keys.size(1):
                    attended = attend_at_one_position(
                        queries.flatten(1), keys.flatten(2), values.flatten(2), queries.size(2)
                    )
                    y[:, heads] = attended.view(queries.squeeze(1).shape)
            return output(y.flatten(1)), self.after(state, place + 1)

        return MixerStep(self, mix)

    def append(self, state: OpenChunk, k: Tensor, v: Tensor) -> OpenChunk:
        return OpenChunk(state.cache.append(k, v, self.config.chunk_size))

    def visible(self, state: OpenChunk, name: str, place: int, sets: str, subblock: int) -> List[Tensor]:
        """The keys or values that the token at `place` of the window sees: (R, ., d) each."""
        x, stride = getattr(state.cache, name), self.config.stride
        band, column = x[:, max(0, place - stride) :], x[:, place % stride :: stride]
        if sets == "merged":  # the last two of the column are in the band
            return [x[:, place % stride : max(0, place - stride) : stride], band]
        return [band if sets == "first" else column]

    def after(self, state: OpenChunk, place: int) -> OpenChunk:
        """The state for the token at `place`."""
        return OpenChunk(state.cache.unless_complete(self.config.chunk_size))


# ------------------------------------------------------------------------------------------- the fixed pattern


class FixedAttention(SparseAttention):
    """Sparse attention with the fixed pattern, whose state has only the places that later tokens see."""

    State = Summarized

    def __init__(self, config: SparseConfig):
        super().__init__(config)
        self.kept = config.summary * config.subblocks  # places of a finished block
        self.layout = config.stride, self.kept, 0 if config.sparsity.sets == "first" else config.dim

    def mix_values(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tuple[Tensor, Optional[Summarized]]:
        c, state = self.config, batch.state
        if not c.causal:
            return self.in_chunks(self.attend, q, k, v, None, batch)
        if state is not None and (state.open.keys.size(1) >= c.stride or state.summaries.keys.size(1) % self.kept):
            raise ValueError(
                f"the state has another stride or summary than this module, {c.stride} and {self.kept}; continue with "
                "the module that made it"
            )
        place = 0 if state is None else self.place(state)
        ragged = batch.lengths is not None or isinstance(place, Tensor)
        if state is None or ragged or (c.chunk_size is not None and place + q.size(1) >= c.chunk_size):
            cache = None if state is None else restore(state, c.stride, self.kept)
            out, cache = self.in_chunks(self.attend, q, k, v, cache, batch)
            return out, summarize(cache, *self.layout)
        joined = state.open.append(k, v, c.stride)
        out = self.attend(q, joined.keys, joined.values, None, self.finished(state))
        return out, advance(state, joined, *self.layout)

    def finished(self, state: Summarized) -> Optional[Tuple[Tensor, Tensor]]:
        """The keys and values of finished blocks as `sparse_attention` takes them: (B, F, c s, H, z)."""
        if state.summaries.keys.size(2) == 0:
            return None
        blocks, heads = state.summaries.keys.size(1) // self.kept, self.config.heads
        return tuple(t.unflatten(1, (blocks, self.kept)).unflatten(-1, (heads, -1)) for t in state.summaries[:2])

    def place(self, state: Summarized) -> Place:
        return state.summaries.place // self.kept * self.config.stride + state.open.place

    def state_shapes(self) -> Dict[str, Shape]:
        length = "summaries so far" if self.config.chunk_size is None else "up to the summaries of a chunk"
        shapes = {"open": ("up to stride - 1", self.config.dim), "summaries": (length, self.layout[2])}
        return {f"{part}.{name}": shape for part, shape in shapes.items() for name in ("keys", "values")}

    def append(self, state: Summarized, k: Tensor, v: Tensor) -> Summarized:
        return Summarized(state.open.append(k, v, self.config.stride), state.summaries)

    def visible(self, state: Summarized, name: str, place: int, sets: str, subblock: int) -> List[Tensor]:
        c, block, ends = self.config, getattr(state.open, name), getattr(state.summaries, name)
        if sets == "first":
            return [block]
        first = c.stride - c.summary * (subblock + 1)  # of the summary in its block
        start, count = first - (c.stride - self.kept), ends.size(1) // self.kept
        summaries = ends.unflatten(1, (count, self.kept))[:, :, start : start + c.summary].flatten(1, 2)
        return [summaries, block if sets == "merged" else block[:, first : first + c.summary]]

    def after(self, state: Summarized, place: int) -> Summarized:
        if place == self.config.chunk_size:
            return Summarized(*(cache.unless_complete(cache.keys.size(1)) for cache in state))
        return advance(state, state.open, *self.layout)
