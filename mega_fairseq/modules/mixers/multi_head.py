"""Multi-head attention (Vaswani et al. 2017), with the time weighting, talking heads and partial RoPE of RWKV."""

import math
from dataclasses import dataclass
from itertools import repeat
from typing import Optional, Tuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mega_fairseq.modules.config import inherited, setting
from mega_fairseq.modules.mixer import Batch, MixerStep
from mega_fairseq.modules.mixer_state import OpenChunk
from mega_fairseq.modules.projection import linear, packed, project
from mega_fairseq.modules.time_tables import TimeConfig, TimeMixer, by_distance, curves
from mega_fairseq.ops.attention import attention, weighted_sum
from mega_fairseq.ops.attention.heads import append_columns, merge_heads, rotate_heads, scale_places, split_heads
from mega_fairseq.ops.attention.naive import attention_weights
from mega_fairseq.ops.attention.one_position import (
    attend_at_one_position,
    head_weights_at_one_position,
    weighted_sum_by_head,
)
from mega_fairseq.ops.attention.tiles import TILE_SCORES
from mega_fairseq.ops.dropout import keep_mask
from mega_fairseq.ops.precision import cast_dtype, product_dtype, without_autocast

TIME_WEIGHTS = ("none", "before", "after")


@dataclass(frozen=True)
class AttentionConfig(TimeConfig):
    """Options of multi-head attention.

    With places t, u in a chunk, `before` adds w(t - u) + log beta(u) to the scores, and `after` multiplies the softmax
    by f(t - u) alpha(t) beta(u), per head. In `before`, alpha would cancel.
    """

    time_weight: str = setting(
        "none", "learned weights of distances, before or after the softmax", "{side}_time_weight", choices=TIME_WEIGHTS
    )
    alpha: bool = setting(
        False,
        "learned weight of each place of a query in its chunk",
        "{side}_time_alpha",
        only_with=("time_weight", "after"),
    )
    beta: bool = inherited(TimeConfig, "beta", only_with=("time_weight", "before", "after"))
    talking_heads: bool = setting(False, "mix the attention weights of all heads", "{side}_talking_heads")
    rotary_dims: int = setting(0, "dimensions of each head that RoPE rotates", "{side}_rotary_dims")
    attention_dropout: float = setting(0.0, "dropout on attention weights", "attention_dropout")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_heads(self.dim, "width of the model")
        self.check_rotary()
        if self.talking_heads and self.heads == 1:
            raise ValueError(f"{self.name('talking_heads')} mixes heads and {self.name('heads')} is 1; leave it out")

    @property
    def tabled(self) -> bool:
        return self.gamma or self.time_weight != "none"

    def build(self) -> "MultiHeadAttention":
        return MultiHeadAttention(self)


EXAMPLES = {
    "attention": AttentionConfig(4, heads=2, rotary_dims=2, chunk_size=6),
    "attention, unbounded": AttentionConfig(4, heads=2, rotary_dims=2),
    "attention, before": AttentionConfig(4, heads=2, chunk_size=6, time_weight="before", beta=True, gamma=True),
    "attention, after": AttentionConfig(
        4, heads=2, chunk_size=6, time_weight="after", alpha=True, beta=True, token_shift=True
    ),
    "attention, talking heads": AttentionConfig(4, heads=2, chunk_size=6, time_weight="after", talking_heads=True),
}


class MultiHeadAttention(TimeMixer):
    """M(X) = (gamma * concat_h(P_h V_h)) W_o + b_o."""

    State = OpenChunk

    def __init__(self, config: AttentionConfig):
        super().__init__(config)
        c = config
        self.query, self.key, self.value = (linear(c.dim, c.dim, c.init) for _ in range(3))
        self.output = linear(c.dim, c.dim, c.init)
        before, after = c.time_weight == "before", c.time_weight == "after"
        self.log_weight = nn.Parameter(curves(c, c.chunk_size)) if before else None  # (H, T) or (H, 2 T - 1)
        self.log_beta = self.learned_table(before and c.beta, 0.0)  # (H, T)
        self.time_weight = nn.Parameter(curves(c, c.chunk_size).exp()) if after else None
        self.alpha, self.beta = self.learned_table(after and c.alpha), self.learned_table(after and c.beta)
        self.gamma = nn.Parameter(torch.ones(c.chunk_size)) if c.gamma else None
        self.talking = nn.Parameter(torch.eye(c.heads)) if c.talking_heads else None

    def mix(self, x: Tensor, batch: Batch) -> Tuple[Tensor, Optional[OpenChunk]]:
        c = self.config
        q, k, v = (project(layer, x) for layer in (self.query, self.key, self.value))  # (B, L, d) each
        v = self.drop(v, c.hidden_dropout)
        # Keys are cached rotated, so that decoding rotates each of them once.
        first = 0 if batch.state is None else batch.state.cache.place
        q, k = rotate_heads((q, k), first, c.heads, c.rotary_dims, c.chunk_size)
        attended, state = self.in_open_chunk(self.attend, q, k, v, batch)
        return project(self.output, attended), state

    def attend(self, q: Tensor, k: Tensor, v: Tensor, padding: Optional[Tensor]) -> Tensor:
        """Attention within chunks (G, n, d), with the last query at the place of the last key."""
        c, queries, keys = self.config, q.size(1), k.size(1)
        q, k, v = (split_heads(t, c.heads) for t in (q, k, v))
        scale = q.size(-1) ** -0.5
        if self.log_beta is not None:  # is one more column of the keys, against ones in the queries
            q, scale = append_columns(q * scale, q.new_ones(queries, 1)), 1.0
            k = append_columns(k, self.log_beta[:, :keys].unsqueeze(-1))
        padding = None if padding is None else padding.repeat_interleave(c.heads, 0)
        dropout = self.dropout_module.rate(c.attention_dropout)
        bias, multiplier, alpha, beta = self.tables(queries, keys)
        if self.talking is not None:
            out, alpha = self.talk(q, k, v, scale, padding, dropout), None
        else:
            v = v if beta is None else scale_places(v, beta)
            out = attention(q, k, v, "softmax", c.causal, bias, padding, dropout, multiplier, scale=scale)
        factors = [alpha, self.at(self.gamma, slice(keys - queries, keys))]
        factors = [factor for factor in factors if factor is not None]
        if factors:
            out = scale_places(out, math.prod(factors).expand(c.heads, -1))
        return merge_heads(out, c.heads)

    def tables(self, queries: int, keys: int) -> Tuple[Optional[Tensor], ...]:
        """log_weight and time_weight by distance (H, n + m - 1), alpha (H, n) and beta (H, m), each None if missing."""
        tables = (self.log_weight, self.time_weight)
        distances = (None if t is None else by_distance(t, self.config.causal, queries, keys) for t in tables)
        return *distances, self.at(self.alpha, slice(keys - queries, keys)), self.at(self.beta, slice(0, keys))

    def talk(self, q: Tensor, k: Tensor, v: Tensor, scale: float, padding: Optional[Tensor], dropout: float) -> Tensor:
        """Attention with talking heads: every head reads a mixture of the weights of all heads.

        The weights, (G H, n, m), are computed again in backward.
        """
        heads, queries, keys = self.config.heads, q.size(1), k.size(1)
        bias, multiplier, alpha, beta = self.tables(queries, keys)
        keep, keep_scale = keep_mask((q.size(0), queries, keys), dropout, q.device)

        def mixture(q: Tensor, k: Tensor, v: Tensor, pads: Optional[Tensor], keep: Optional[Tensor]) -> Tensor:
            weights = attention_weights(q, k, "softmax", self.config.causal, bias, pads, multiplier, scale=scale)
            weights = weights.unflatten(0, (-1, heads))
            weights = weights if alpha is None else weights * alpha.unsqueeze(-1)
            weights = weights if beta is None else weights * beta.unsqueeze(-2)
            weights = torch.einsum("hg,bgnm->bhnm", self.talking.to(weights.dtype), weights).flatten(0, 1)
            return weighted_sum(weights if keep is None else weights * keep * keep_scale, v)

        dtype = product_dtype(q, cast_dtype(q))
        rows = heads * max(1, TILE_SCORES // (queries * keys * heads))  # whose weights fit into the cache
        tensors = (q.to(dtype), k.to(dtype), v.to(dtype), padding, keep)
        pieces = zip(*(repeat(None) if t is None else t.split(rows) for t in tensors))
        with without_autocast(q):
            return torch.cat([checkpoint(mixture, *piece, use_reentrant=False) for piece in pieces]).to(cast_dtype(v))

    def step(self) -> MixerStep:
        """Attention for one token, with one projection for queries, keys and values."""
        c, project, output = self.config, packed(self.query, self.key, self.value), packed(self.output)

        def mix(x: Tensor, residual: Tensor, state: OpenChunk) -> Tuple[Tensor, OpenChunk]:
            place = state.cache.place
            both, v = project(x).unsqueeze(1).split([2 * c.dim, c.dim], -1)
            (both,) = rotate_heads([both], place, 2 * c.heads, c.rotary_dims)
            q, k = both.chunk(2, -1)  # (R, 1, d) each
            cache = state.cache.append(k, v, c.chunk_size)
            attended = self._attend_last(q.squeeze(1), cache.keys, cache.values)
            if self.gamma is not None:
                attended = attended * self.gamma[place]
            return output(attended), OpenChunk(cache.unless_complete(c.chunk_size))

        return MixerStep(self, mix)

    def _attend_last(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The query of the last place, q (R, d), against all keys: (R, d)."""
        c, keys = self.config, k.size(1)
        bias, *factors = self.tables(1, keys)  # (H, m)
        if self.log_beta is not None:
            bias = bias + self.log_beta[:, :keys]
        if c.time_weight != "after" and not c.talking_heads:
            return attend_at_one_position(q, k, v, c.heads, bias)
        weights = head_weights_at_one_position(q, k, c.heads, bias)  # (R, H, m)
        for factor in factors:
            weights = weights if factor is None else weights * factor
        if self.talking is not None:
            weights = torch.matmul(self.talking.to(weights.dtype), weights)
        return weighted_sum_by_head(weights, v)
