"""Moving average equipped gated attention: the layer that gives Mega its name (paper, section 3.2, eq. 6-15)."""

from typing import NamedTuple, Optional, Tuple, Union

import torch
from torch import Tensor, nn

from mega_fairseq.modules.attend import attend
from mega_fairseq.modules.checks import (
    check_padding_mask,
    check_sequence,
    check_state_shape,
    check_state_type,
)
from mega_fairseq.modules.config import GatedAttentionConfig
from mega_fairseq.modules.ema import DampedEMA
from mega_fairseq.modules.linear import RELEASED_STD, linear
from mega_fairseq.modules.normalization import SequenceNorm
from mega_fairseq.modules.position import POSITION_BIASES
from mega_fairseq.ops.chunks import KeyValues, causal_chunked, chunked
from mega_fairseq.ops.dropout import dropped, keep_mask
from mega_fairseq.ops.gating import activated_linear, gated_output
from mega_fairseq.ops.padding import Padding, to_front


class GatedAttentionState(NamedTuple):
    """All that a causal layer remembers: O(d h) of EMA and one unfinished chunk."""

    ema: Tensor  # (B, D, N)
    cache: KeyValues  # keys (B, m, z), values (B, m, v)


class MovingAverageGatedAttention(nn.Module):
    """(B, L, D) -> (B, L, D). Causal: `y, state = module(x, state, padding_mask)`; otherwise `y = module(x, ...)`."""

    def __init__(self, config: GatedAttentionConfig):
        super().__init__()
        self.config = c = config
        self.norm = SequenceNorm(c.norm, c.dim, affine=c.norm_affine)
        self.ema = DampedEMA(c.dim, c.ndim, bidirectional=not c.causal, truncation=c.truncation)
        self.values = linear(c.dim, c.value_dim, c.init)
        self.shared = linear(c.dim, c.shared_dim, c.init)
        self.gates = linear(c.dim, c.dim + c.value_dim + c.dim, c.init)  # update, reset, candidate
        self.hidden = linear(c.value_dim, c.dim, c.init)  # U_h
        self.kappa = nn.Parameter(torch.empty(2, c.shared_dim))  # scale and offset of queries (0) and keys (1)
        self.mu = nn.Parameter(torch.zeros(2, c.shared_dim))
        nn.init.normal_(self.kappa, 0.0, RELEASED_STD) if c.init == "released" else nn.init.ones_(self.kappa)
        self.position_bias = POSITION_BIASES[c.position_bias](c.shared_dim, c.chunk_size or c.max_positions, c.causal)

    def forward(
        self, x: Tensor, state: Optional[GatedAttentionState] = None, padding_mask: Optional[Padding] = None
    ) -> Union[Tensor, Tuple[Tensor, GatedAttentionState]]:
        c = self.config
        check_sequence("x", x, c.dim, self.kappa)
        check_padding_mask(padding_mask, x)
        self._check_state(state, x)
        x, align, padding_mask = to_front(x, padding_mask, self.position_bias.reach)
        lengths = None if align is None else align.lengths

        residual = x
        if c.prenorm:
            x = self.norm(x, padding_mask)
        values = activated_linear(x, self.values.weight, self.values.bias, c.activation)  # V (B, L, v), eq. 10
        values = dropped(values, self._rate(c.hidden_dropout), c.feature_dropout)

        ema_state = None
        if c.causal:
            x, ema_state = self.ema.aligned(x, None if state is None else state.ema, lengths)
        else:
            x = self.ema.aligned(x, None, lengths)
        x = dropped(x, self._rate(c.dropout), c.feature_dropout)  # X' (B, L, D), eq. 6
        shared = activated_linear(x, self.shared.weight, self.shared.bias)  # Z (B, L, z), eq. 7
        queries, keys = (torch.addcmul(self.mu[i], shared, self.kappa[i]) for i in (0, 1))  # eq. 8-9

        if c.causal:
            cache = None if state is None else state.cache
            attended, cache = causal_chunked(self._attend, queries, keys, values, c.chunk_size, cache, lengths)
        else:
            attended = chunked(self._attend, queries, keys, values, c.chunk_size, padding_mask)  # O (B, L, v), eq. 11

        keep, scale = keep_mask(self._dropout_shape(residual), self._rate(c.dropout), x.device)
        gates, hidden = (self.gates.weight, self.gates.bias), (self.hidden.weight, self.hidden.bias)
        y = gated_output(x, attended, residual, gates, hidden, c.activation, keep, scale)  # Y, eq. 12-15
        if not c.prenorm:
            y = self.norm(y, padding_mask)
        if align is not None:
            y = align.back(y.masked_fill(padding_mask.unsqueeze(-1), 0.0))
        return (y, GatedAttentionState(ema_state, cache)) if c.causal else y

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, padding: Optional[Tensor]) -> Tensor:
        """Attention inside groups whose last query stands at their last key."""
        c = self.config
        first_query, dropout = k.size(1) - q.size(1), self._rate(c.attention_dropout)
        return attend(q, k, v, self.position_bias, first_query, c.attention, c.causal, padding, dropout)

    def _check_state(self, state: Optional[GatedAttentionState], x: Tensor) -> None:
        if state is None:
            return
        c = self.config
        if not c.causal:
            raise ValueError("state was given to a bidirectional layer; only causal=True carries one")
        check_state_type(state, GatedAttentionState)
        self.ema.check_state(state.ema, x)
        keys, values, padding, _ = state.cache
        length = "cached keys" if c.chunk_size is None else "up to chunk_size - 1"
        check_state_shape("state.cache.keys", keys, (x.size(0), length, c.shared_dim))
        check_state_shape("state.cache.values", values, (x.size(0), keys.size(1), c.value_dim))
        if padding is not None:
            check_state_shape("state.cache.padding", padding, (x.size(0), keys.size(1)))
        if c.chunk_size is not None and keys.size(1) >= c.chunk_size:
            raise ValueError(
                f"state.cache.keys has {keys.size(1)} keys and chunk_size is {c.chunk_size}: an unfinished chunk has "
                "up to chunk_size - 1; go on with the chunk_size that the state was made with"
            )

    def _rate(self, dropout: float) -> float:
        return dropout if self.training else 0.0

    def _dropout_shape(self, x: Tensor) -> Tuple[int, ...]:
        return (x.size(0), 1, x.size(2)) if self.config.feature_dropout else tuple(x.shape)
