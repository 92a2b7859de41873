"""Gated cross attention, from a translation decoder to the encoder's output (released code; paper, section 4.3)."""

from dataclasses import dataclass
from typing import Callable, Dict, NamedTuple, Optional, Tuple, Union

import torch
from torch import Tensor, nn

from mega_fairseq.modules.config import ModuleConfig, setting
from mega_fairseq.modules.layer import Layer, check_padding_mask
from mega_fairseq.modules.position_bias import (
    POSITION_BIASES,
    PositionBias,
    TabledBias,
    biased_weights,
    check_attention,
)
from mega_fairseq.modules.projection import gated_residual, linear, packed, project
from mega_fairseq.ops.activations import ACTIVATIONS
from mega_fairseq.ops.attention import ATTENTION_FUNCTIONS, attention, weighted_sum
from mega_fairseq.ops.attention.fixed import FixedPlace, attend_in_storage
from mega_fairseq.ops.attention.one_position import few_scores
from mega_fairseq.ops.attention.segments import NEAR, Bias, Segments, attention_in_segments, segment_weights
from mega_fairseq.ops.gates import gate_output
from mega_fairseq.ops.linear import Projection, packing_runs, ready_linear
from mega_fairseq.ops.padding import Alignment, Padding, as_mask, padding_from_lengths, to_front

POSITIONS = ("token", "sentence")  # what distances in the position bias count from
LONG_SOURCE = 256  # number of source tokens from which packing the values pays off


@dataclass(frozen=True)
class GatedCrossAttentionConfig(ModuleConfig):
    """Options of gated cross attention; its values are as wide as the model."""

    shared_dim: int = setting(0, "width of queries and keys", "{side}_z_dim")  # 0: a quarter of dim
    source_dim: int = setting(0, "width of the encoder's output")  # 0: dim
    attention: str = setting("softmax", "attention function", "attention_activation_fn", choices=ATTENTION_FUNCTIONS)
    position_bias: str = setting("simple", "relative position bias", "rel_pos_bias", choices=POSITION_BIASES)
    max_positions: int = setting(1024, "reach of position bias simple")
    activation: str = setting("silu", "activation of values and candidate", "activation_fn", choices=ACTIVATIONS)
    attention_dropout: float = setting(0.0, "dropout on attention weights", "attention_dropout")
    hidden_dropout: float = setting(0.0, "dropout on attention's values", "hidden_dropout")
    positions: str = setting(
        "token", "positions in the whole text, or in each line of it", "cross_attention_positions", choices=POSITIONS
    )
    window: Optional[int] = setting(
        None, "most lines between a target token's and those that it attends to", "cross_attention_window"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.set_default("shared_dim", self.dim // 4)
        self.set_default("source_dim", self.dim)
        check_attention(self)
        self.check_positive("source_dim")
        self.check_causal_norm()

    @property
    def takes_segments(self) -> bool:
        """Whether attention depends on the lines of source and target tokens."""
        return self.positions == "sentence" or self.window is not None


class CrossAttentionState(NamedTuple):
    """The projected sources, and the position of each target.

    B targets share S sources, B / S consecutive ones each: the beams of a sentence share its keys and values.
    """

    keys: Tensor  # (S, m, z)
    values: Tensor  # (S, m, d)
    padding: Optional[Tensor]  # (S, m) bool, True = pad, at the end of each source
    position: int  # the largest number of target tokens that a row has seen
    lengths: Optional[Tensor] = None  # (B,) target tokens seen by each row, if they differ
    packed: Optional[Tuple[Projection, ...]] = None  # the values of each source, packed for single tokens

    def reorder(self, order: Tensor, sources: Optional[Tensor] = None) -> "CrossAttentionState":
        """Reorders the targets; `sources` (S',) selects the sources that remain, by default all."""
        state = self
        if self.lengths is not None:
            lengths = self.lengths.index_select(0, order)
            even = bool((lengths == lengths[:1]).all())  # such as after beams that all continue one
            state = self._replace(position=int(lengths[0]), lengths=None) if even else self._replace(lengths=lengths)
        if sources is None:
            return state
        keys, values, padding = (None if t is None else t.index_select(0, sources) for t in state[:3])
        packed = None if state.packed is None else tuple(state.packed[i] for i in sources.tolist())
        return state._replace(keys=keys, values=values, padding=padding, packed=packed)


class GatedCrossAttention(Layer):
    """Target x (B, n, D), source (B, m, D') -> (B, n, D): `y, state = module(x, source, state, ...)`.

    Y = u silu(W_h (r O)) + (1 - u) X. The gates u, r and the queries are projections of the (normed) target, keys and
    values of the source. The relative bias depends on target position minus source position; pads are not counted.
    A state contains the projected source, so `source` is given in the first call only. `project_source` returns a first
    state. It may have fewer sources than there are targets: consecutive targets then share a source.

    With `segments`, for a config that takes them, the bias depends on the lines of target and source tokens instead.
    """

    def __init__(self, config: GatedCrossAttentionConfig):
        super().__init__(config)
        c = config
        self.queries = linear(c.dim, c.shared_dim, c.init)
        self.gates = linear(c.dim, 2 * c.dim, c.init)  # update, reset
        self.keys = linear(c.source_dim, c.shared_dim, c.init)
        self.values = linear(c.source_dim, c.dim, c.init)
        self.hidden = linear(c.dim, c.dim, c.init)
        self.position_bias = POSITION_BIASES[c.position_bias](c.shared_dim, c.max_positions, False)
        by_line = c.positions == "sentence"
        self.segment_scores = nn.Parameter(_near_lines()) if by_line else None

    def project_source(self, source: Tensor, source_padding_mask: Optional[Padding] = None) -> CrossAttentionState:
        """Keys and values of the encoder's output, computed once per translation."""
        check_padding_mask(source_padding_mask, source, "source_padding_mask")
        source, _, source_padding_mask = to_front(source, source_padding_mask, self.longest)
        values = project(self.values, source, self.config.activation)
        return CrossAttentionState(project(self.keys, source), values, source_padding_mask, 0)

    def forward(
        self,
        x: Tensor,
        source: Optional[Tensor] = None,
        state: Optional[CrossAttentionState] = None,
        padding_mask: Optional[Padding] = None,
        source_padding_mask: Optional[Padding] = None,
        segments: Optional[Segments] = None,
        need_weights: bool = False,
    ) -> Tuple:
        """`need_weights` also returns the attention weights f(Q K^T / tau + b_rel), without dropout: (B, n, m)."""
        c = self.config
        check_padding_mask(padding_mask, x)
        if (source is None) == (state is None) or (source is None and source_padding_mask is not None):
            raise ValueError("give source, with its mask, in the first call and state in later ones")
        if state is None:
            state = self.project_source(source, source_padding_mask)
        sources = state.keys.size(0)
        if sources == 0 or x.size(0) % sources or (source is not None and x.size(0) != sources):
            raise ValueError(
                f"x has {x.size(0)} sequences and there are {sources} sources; give each target its source, or let "
                "equally many targets share one with state=project_source(source)"
            )
        padding = as_mask(padding_mask)
        if padding is not None:
            x = x.masked_fill(padding.unsqueeze(-1), 0.0)
        residual = x
        if c.prenorm:
            x = self.norm(x)
        queries = project(self.queries, x)
        if segments is None:
            queries, back, state = _by_position(queries, padding, state)  # (B, n', z)
        else:
            back, state = _unchanged, state._replace(position=state.position + x.size(1))
        attended = back(self._attend(queries, state, segments))  # (B, n, D)
        keep, scale = self.keep_mask(x, c.dropout)
        y = gated_residual(x, attended, residual, self.gates, self.hidden, c.activation, keep, scale)
        if not c.prenorm:
            y = self.norm(y)
        if padding is not None:
            y = y.masked_fill(padding.unsqueeze(-1), 0.0)
        if not need_weights:
            return y, state
        identity = torch.eye(state.keys.size(1), dtype=queries.dtype, device=queries.device)  # as values
        state_of_weights = state._replace(values=identity.expand(sources, -1, -1))
        weights = back(self._attend(queries, state_of_weights, segments, drops=False))
        return y, state, weights if padding is None else weights.masked_fill(padding.unsqueeze(-1), 0.0)

    @property
    def longest(self) -> Optional[int]:
        """The longest source and target that it can process; None for any length."""
        return None if self.segment_scores is not None else self.position_bias.longest

    def adapt(self, stored: Dict[str, Tensor], prefix: str) -> None:
        """Same as `Mixer.adapt`, for other limits of sources and targets."""
        c = self.config

        def beyond(learned: int) -> str:
            return (
                f"max_positions is {c.max_positions} and position_bias 'simple' of these weights reaches {learned} "
                "tokens; allow no more, or train with position_bias 'rotary'"
            )

        self.position_bias.adapt(stored, f"{prefix}position_bias.", beyond)
        if self.segment_scores is not None:  # a model that was trained with other positions may be the start
            stored.setdefault(f"{prefix}segment_scores", _near_lines())

    def step(self) -> Callable[..., Tuple[Tensor, CrossAttentionState]]:
        """The layer for one token at a time, with one projection for the queries and both gates."""
        c, norm, position_bias = self.config, self.norm, TabledBias(self.position_bias)
        project, project_hidden = packed(self.queries, self.gates), packed(self.hidden)
        scale = c.shared_dim**-0.5

        def step(
            x: Tensor,
            source: None,
            state: CrossAttentionState,
            mask: None,
            source_mask: None,
            segments: Optional[Segments],
        ) -> Tuple[Tensor, CrossAttentionState]:
            residual = x.squeeze(1)  # (R, D)
            projected = project(norm(residual) if c.prenorm else residual)
            queries, update, reset = projected.split((c.shared_dim, c.dim, c.dim), -1)
            keys, values, padding, position, _, packed_values = state
            fixed = isinstance(position, FixedPlace)
            if segments is None and fixed and not position_bias.rotates:
                bias = position_bias(1 - position.limit, keys.size(1), keys.device)
                attended = attend_in_storage(queries, keys, values, position, bias, c.attention, padding=padding)
            else:
                beams = queries.reshape(keys.size(0), -1, c.shared_dim)  # (R, z) -> (S, R / S, z)
                if segments is None:
                    weights = biased_weights(beams, keys, position_bias, position, c.attention, padding)
                else:
                    stop = position.limit if fixed else position + 1
                    beams, keys, segments, bias = self._in_segments(position_bias, beams, keys, segments, stop)
                    scores = few_scores(beams, keys, scale)
                    weights = segment_weights(scores, segments, bias, c.attention, padding, scale)
                if packed_values is None and values.size(1) >= LONG_SOURCE and packing_runs(values):
                    packed_values = tuple(ready_linear(of_source.t()) for of_source in values)
                if packed_values is None:
                    attended = weighted_sum(weights, values)  # (S, n, m) times (S, m, d)
                else:
                    attended = torch.stack([product(rows) for product, rows in zip(packed_values, weights)])
                attended = attended.reshape(residual.shape)
            y = gate_output(update, reset, None, attended, residual, project_hidden, c.activation)
            y = y if c.prenorm else norm(y)
            after = position if fixed else position + 1  # the owner of a fixed place advances it
            return y.unsqueeze(1), state._replace(position=after, packed=packed_values)

        return step

    def _attend(
        self, queries: Tensor, state: CrossAttentionState, segments: Optional[Segments], drops: bool = True
    ) -> Tensor:
        """(B, n, z) at the last n positions against S sources -> (B, n, D)."""
        c, (targets, length, _) = self.config, queries.shape
        values = self.drop(state.values, c.hidden_dropout) if drops else state.values
        dropout = self.dropout_module.rate(c.attention_dropout) if drops else 0.0
        keys, padding = state.keys, state.padding
        if segments is not None:
            q, k, *rest = self._in_segments(self.position_bias, queries, keys, segments, state.position)
            attended = attention_in_segments(q, k, values, *rest, c.attention, padding, dropout)
            return attended.reshape(targets, length, -1)
        first = state.position - length
        if length == 1 and dropout == 0.0:
            beams = queries.view(keys.size(0), -1, c.shared_dim)  # (B, 1, z) -> (S, B / S, z)
            weights = biased_weights(beams, keys, self.position_bias, first, c.attention, padding)
            return weighted_sum(weights, values).reshape(targets, 1, -1)
        beams = targets // keys.size(0)
        if beams > 1:
            keys, values, padding = (
                None if t is None else t.repeat_interleave(beams, 0) for t in (keys, values, padding)
            )
        queries, keys, bias = self.position_bias.positioned(queries, keys, first)
        return attention(queries, keys, values, c.attention, False, bias, padding, dropout)

    def _in_segments(
        self, position_bias: Union[PositionBias, TabledBias], q: Tensor, k: Tensor, segments: Segments, stop: int
    ) -> Tuple[Tensor, Tensor, Segments, Bias]:
        """Queries (R, n, z) at positions below `stop` -> (S, n R / S, z), by source; keys (S, m, z)."""
        longest, limit = self.position_bias.longest, k.size(1)
        first, limit = (1 - stop, limit) if longest is None else (max(1 - stop, 1 - longest), min(limit, longest))
        table = position_bias(first, limit, k.device)
        if table is None:
            table = torch.zeros(1, device=k.device)
        if self.segment_scores is None:
            table = table.expand(2 * NEAR + 1, -1)
        else:
            table = table + self.segment_scores.unsqueeze(1)
        sources = k.size(0)
        q, of_queries = (t.reshape(sources, -1, t.size(-1)) for t in (q, segments.queries))
        q, k = position_bias.rotate(q, of_queries[..., 1]), position_bias.rotate(k, segments.keys[..., 1])
        return q, k, Segments(of_queries, segments.keys), Bias(table, first, self.config.window)


def _near_lines() -> Tensor:
    """The first scores of lines. From zeros, training learns too slowly that the aligned line is the one to read."""
    return -2.0 * torch.arange(-NEAR, NEAR + 1).abs()


def _unchanged(out: Tensor) -> Tensor:
    return out


def _by_position(queries: Tensor, padding_mask: Optional[Tensor], state: CrossAttentionState):
    """Queries laid out by absolute position, a function that undoes this for the outputs, and the next state."""
    new, source = queries.size(1), state[:3]
    if padding_mask is None and state.lengths is None:
        return queries, _unchanged, CrossAttentionState(*source, state.position + new)
    # Rows are at different positions: lay each one out from position 0, with blanks for the tokens seen before.
    past = queries.new_zeros((queries.size(0), state.position), dtype=torch.bool)
    if state.lengths is not None:
        past = padding_from_lengths(state.lengths, state.position)
    pads = queries.new_zeros(queries.shape[:2], dtype=torch.bool) if padding_mask is None else padding_mask
    align = Alignment.of(torch.cat([past, pads], 1), crop=True)
    blanks = queries.new_zeros(queries.size(0), state.position, queries.size(2))
    laid_out = align.front(torch.cat([blanks, queries], 1))
    return laid_out, lambda out: align.back(out)[:, -new:], CrossAttentionState(*source, align.width, align.lengths)
