"""The attention of the Sparse Transformer (Child et al. 2019): strided and fixed patterns of about sqrt(n) keys."""

from dataclasses import dataclass
from typing import Dict, Optional, Tuple

import torch
from torch import Tensor, nn

from mega_fairseq.modules.config import setting
from mega_fairseq.modules.mixer import Batch, Mixer, MixerConfig
from mega_fairseq.modules.mixer_state import OpenChunk, Shape
from mega_fairseq.modules.projection import linear
from mega_fairseq.ops.chunks import KeyValues, causal_chunked, chunked
from mega_fairseq.ops.dropout import dropped
from mega_fairseq.ops.position import rotate
from mega_fairseq.ops.sparse_attention import PATTERNS, Sparsity, sparse_attention

COMBINATIONS = ("interleaved", "merged", "heads")
INIT_STD = 0.125  # times 1 / sqrt(fan in) (Child et al., section 6)


@dataclass(frozen=True)
class SparseConfig(MixerConfig):
    """Options of sparse attention."""

    heads: int = setting(8, "number of heads", "{side}_attention_heads")
    pattern: str = setting(
        "fixed",
        "keys of sparse attention: fixed blocks and their summaries (text), or strided (images, music)",
        "{side}_sparse_pattern",
        choices=PATTERNS,
    )
    stride: int = setting(128, "stride of sparse attention, the size of its blocks", "{side}_sparse_stride", "l")
    summary: int = setting(8, "places at the end of a block that later blocks see", "{side}_sparse_summary", "c")
    subblocks: int = setting(1, "number of different summaries, of different heads", "{side}_sparse_subblocks")
    combine: str = setting(
        "merged",
        "which of its two sets of keys attention sees: in turn by layer, both, or in turn by head",
        "{side}_sparse_combine",
        choices=COMBINATIONS,
    )
    rotary_dims: int = setting(0, "dimensions of each head that RoPE rotates; 0 for none", "{side}_rotary_dims")
    attention_dropout: float = setting(0.0, "dropout on attention weights", "attention_dropout")
    layer: int = setting(0, "number of this layer, from 0")
    layers: int = setting(1, "number of layers of the model")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_positive("heads", "stride", "summary", "subblocks")
        self.check_probability("attention_dropout")
        if self.dim % self.heads:
            raise ValueError(
                f"{self.name('heads')} is {self.heads} and does not divide {self.name('dim')}, {self.dim}; "
                "give a divisor"
            )
        width = self.dim // self.heads
        if self.rotary_dims % 2 or not 0 <= self.rotary_dims <= width:
            raise ValueError(
                f"{self.name('rotary_dims')} is {self.rotary_dims} and RoPE rotates pairs of a head's {width} "
                f"dimensions; give an even number from 0 to {width}"
            )
        if self.pattern == "strided" and self.subblocks > 1:
            raise ValueError(
                f"{self.name('subblocks')} is {self.subblocks} and the strided pattern has no summaries; leave it "
                f"out, or set {self.name('pattern')} to fixed"
            )
        if self.pattern == "fixed" and self.summary * self.subblocks > self.stride:
            given = f"{self.name('summary')} is {self.summary}"
            if self.subblocks > 1:
                given += f" times {self.subblocks} {self.name('subblocks')}"
            raise ValueError(
                f"{given} and {self.name('stride')} {self.stride}; the summaries of a block cannot be longer than it"
            )

    @property
    def sparsity(self) -> Sparsity:
        sets = ("first", "second")[self.layer % 2] if self.combine == "interleaved" else self.combine
        return Sparsity(self.pattern, sets, self.stride, self.causal, self.summary, self.subblocks)

    def build(self) -> "SparseAttention":
        return SparseAttention(self)


def _projection(c: SparseConfig, residual: bool = False) -> nn.Linear:
    """`released`: N(0, 0.02) as in all mixers. `scaled`: the paper's initialisation, which depends on the depth."""
    layer = linear(c.dim, c.dim, c.init)
    if c.init == "scaled":
        nn.init.normal_(layer.weight, std=INIT_STD * c.dim**-0.5 / ((2 * c.layers) ** 0.5 if residual else 1.0))
    return layer


class SparseAttention(Mixer):
    """M(X) = Attention(Q, K, V) W_o + b_o, where each place sees the keys of its sparse set."""

    State = OpenChunk

    def __init__(self, config: SparseConfig):
        super().__init__(config)
        self.query, self.key, self.value = (_projection(config) for _ in range(3))
        self.output = _projection(config, residual=True)

    def mix(self, x: Tensor, batch: Batch) -> Tuple[Tensor, Optional[OpenChunk]]:
        c, cache = self.config, None if batch.state is None else batch.state.cache
        q, k, v = self.projected(x, self.places(x, cache))
        if not c.causal:
            return self.output(chunked(self.attend, q, k, v, c.chunk_size, batch.padding)), None
        out, cache = causal_chunked(self.attend, q, k, v, c.chunk_size, cache, batch.lengths)
        return self.output(out), OpenChunk(cache)

    def projected(self, x: Tensor, places: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
        """Queries and keys, rotated to their places, and values: (B, L, D) each."""
        c = self.config
        q, k = (self.rotated(p(x), places) for p in (self.query, self.key))
        return q, k, dropped(self.value(x), self.rate(c.hidden_dropout), c.feature_dropout)

    def rotated(self, x: Tensor, places: Tensor) -> Tensor:
        """x (B, L, D) with the first `rotary_dims` of each head rotated to `places`, (L,) or (B, L)."""
        c = self.config
        if c.rotary_dims == 0:
            return x
        x = x.unflatten(-1, (c.heads, -1)).transpose(1, 2)  # (B, H, L, z)
        turned = rotate(x[..., : c.rotary_dims], places if places.dim() == 1 else places.unsqueeze(1))
        return torch.cat([turned, x[..., c.rotary_dims :]], -1).transpose(1, 2).flatten(2)

    def places(self, x: Tensor, cache: Optional[KeyValues]) -> Tensor:
        """The places of the tokens in their windows, (L,) or (B, L)."""
        places, size = torch.arange(x.size(1), device=x.device), self.config.chunk_size
        if cache is not None:
            read = cache.keys.size(1) if cache.padding is None else (~cache.padding).sum(1, keepdim=True)
            places = places + read
        return places if size is None else places % size

    def attend(self, q: Tensor, k: Tensor, v: Tensor, padding: Optional[Tensor]) -> Tensor:
        """Attention within groups, with the last query at the place of the last key."""
        c = self.config
        q, k, v = (t.unflatten(-1, (c.heads, -1)) for t in (q, k, v))  # (G, n, H, z)
        return sparse_attention(q, k, v, c.sparsity, padding, self.rate(c.attention_dropout)).flatten(2)

    def state_shapes(self) -> Dict[str, Shape]:
        c = self.config
        length = "keys so far" if c.chunk_size is None else "up to chunk_size - 1"
        return {"cache.keys": (length, c.dim), "cache.values": (length, c.dim)}
