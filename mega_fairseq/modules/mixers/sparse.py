"""The attention of the Sparse Transformer (Child et al. 2019): strided and fixed patterns of about sqrt(n) keys."""

from dataclasses import dataclass
from typing import Dict, Optional, Tuple

import torch
from torch import Tensor, nn

from mega_fairseq.modules.config import setting
from mega_fairseq.modules.mixer import Batch, ChunkedConfig, ChunkedMixer, MixerStep
from mega_fairseq.modules.mixer_state import MixerState, OpenChunk, Shape
from mega_fairseq.modules.projection import linear, packed
from mega_fairseq.ops.attention.heads import rotate_heads
from mega_fairseq.ops.attention.one_position import attend_at_one_position
from mega_fairseq.ops.sparse import PATTERNS, Sparsity, alike_heads, places_of_last, sparse_attention

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
    stride: int = setting(128, "stride of sparse attention, the size of its blocks", "{side}_sparse_stride", "l")
    summary: int = setting(8, "positions at the end of a block that later blocks see", "{side}_sparse_summary", "c")
    subblocks: int = setting(1, "number of different summaries, of different heads", "{side}_sparse_subblocks")
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

    ONLY_WITH = {"summary": ("pattern", ("fixed",)), "subblocks": ("pattern", ("fixed",))}

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
        sets = ("first", "second")[self.layer % 2] if self.combine == "interleaved" else self.combine
        return Sparsity(self.pattern, sets, self.stride, self.causal, self.summary, self.subblocks)

    def build(self) -> "SparseAttention":
        return SparseAttention(self)


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
    """M(X) = Attention(Q, K, V) W_o + b_o, where each place sees the keys of its sets."""

    State = OpenChunk  # with all keys of the window
    exports_step = False  # the end of a block is a branch

    def __init__(self, config: SparseConfig):
        super().__init__(config)
        self.query, self.key, self.value = (_projection(config) for _ in range(3))
        self.output = _projection(config, residual=True)

    def mix(self, x: Tensor, batch: Batch) -> Tuple[Tensor, Optional[MixerState]]:
        c = self.config
        q, k = self.query(x), self.key(x)  # (B, L, d)
        v = self.drop(self.value(x), c.hidden_dropout)
        first = 0 if batch.state is None else batch.state.cache.place
        q, k = (rotate_heads(t, first, c.heads, c.rotary_dims, c.chunk_size) for t in (q, k))
        out, state = self.in_open_chunk(self.attend, q, k, v, batch)
        return self.output(out), state

    def attend(self, q: Tensor, k: Tensor, v: Tensor, padding: Optional[Tensor]) -> Tensor:
        """Attention within groups (G, n, d), with the last query at the place of the last key."""
        c = self.config
        q, k, v = (t.unflatten(-1, (c.heads, -1)) for t in (q, k, v))  # (G, n, H, z)
        dropout = self.dropout_module.rate(c.attention_dropout)
        return sparse_attention(q, k, v, c.sparsity, padding, dropout).flatten(2)

    def state_shapes(self) -> Dict[str, Shape]:
        return self.cache_shapes(self.config.dim, self.config.dim)

    def step(self) -> MixerStep:
        """Sparse attention for one token, which takes its visible keys from the state.

        Rows at different places see different columns; they use `forward`, whose cost grows with the window.
        """
        c, project, output = self.config, packed(self.query, self.key, self.value), packed(self.output)
        classes = alike_heads(c.sparsity, c.heads)

        def mix(x: Tensor, residual: Tensor, state: MixerState) -> Tuple[Tensor, MixerState]:
            place = state.cache.place
            both, v = project(x).unsqueeze(1).split([2 * c.dim, c.dim], -1)
            q, k = rotate_heads(both, place, 2 * c.heads, c.rotary_dims).chunk(2, -1)  # (R, 1, d) each
            cache = state.cache.append(k, v, c.chunk_size)
            y = torch.zeros_like(q.view(q.size(0), c.heads, -1))  # (R, H, z)
            for heads, sets, subblock in classes:
                places = places_of_last(c.sparsity._replace(sets=sets), subblock, place + 1, x.device)
                seen = (t.index_select(1, places) for t in (cache.keys, cache.values))
                queries, keys, values = (t.unflatten(-1, (c.heads, -1))[:, :, heads] for t in (q, *seen))
                if keys.size(1):
                    attended = attend_at_one_position(
                        queries.flatten(1), keys.flatten(2), values.flatten(2), queries.size(2)
                    )
                    y[:, heads] = attended.view(queries.squeeze(1).shape)
            return output(y.flatten(1)), OpenChunk(cache.unless_complete(c.chunk_size))

        return MixerStep(self, mix)
