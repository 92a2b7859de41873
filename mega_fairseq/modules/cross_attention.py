"""Gated cross attention, from a translation decoder to the encoder's output (released code; paper, section 4.3)."""

from typing import NamedTuple, Optional, Tuple

import torch
from torch import Tensor, nn

from mega_fairseq.modules.attend import attend
from mega_fairseq.modules.checks import (
    check_padding_mask,
    check_sequence,
    check_state_shape,
    check_state_type,
)
from mega_fairseq.modules.config import GatedCrossAttentionConfig
from mega_fairseq.modules.linear import linear
from mega_fairseq.modules.normalization import SequenceNorm
from mega_fairseq.modules.position import POSITION_BIASES
from mega_fairseq.ops.dropout import dropped, keep_mask
from mega_fairseq.ops.gating import activated_linear, gated_output
from mega_fairseq.ops.padding import Alignment, padding_from_lengths


class CrossAttentionState(NamedTuple):
    """The source, projected once, and how far each target has come."""

    keys: Tensor  # (B, m, z)
    values: Tensor  # (B, m, d)
    padding: Optional[Tensor]  # (B, m) bool, True = pad, at the end of each source
    position: int  # target tokens seen, by the row that has seen most
    lengths: Optional[Tensor] = None  # (B,) the same for each row, where they differ


class GatedCrossAttention(nn.Module):
    """Target x (B, n, D), source (B, m, S) -> (B, n, D): `y, state = module(x, source, state, ...)`.

    Y = u silu(W_h (r O)) + (1 - u) X with u, r and the queries read off the (normed) target, keys and values off the
    source. The relative bias is over absolute target position minus source position, pads counted on neither side.
    Once there is a state, the source it was made from is what counts: `source` may be None.
    """

    def __init__(self, config: GatedCrossAttentionConfig):
        super().__init__()
        self.config = c = config
        self.norm = SequenceNorm(c.norm, c.dim, affine=c.norm_affine)
        self.queries = linear(c.dim, c.shared_dim)
        self.gates = linear(c.dim, 2 * c.dim)  # update, reset
        self.keys = linear(c.source_dim, c.shared_dim)
        self.values = linear(c.source_dim, c.dim)
        self.hidden = linear(c.dim, c.dim)
        self.position_bias = POSITION_BIASES[c.position_bias](c.shared_dim, c.max_positions, False)

    def project_source(self, source: Tensor, source_padding_mask: Optional[Tensor] = None) -> CrossAttentionState:
        """Keys and values of the encoder's output, once for a whole translation."""
        check_sequence("source", source, self.config.source_dim, self.keys.weight)
        check_padding_mask(source_padding_mask, source, "source_padding_mask")
        if source_padding_mask is not None:
            reach = self.position_bias.reach
            align = Alignment.of(source_padding_mask, crop=reach is not None and source.size(1) > reach)
            source_padding_mask = padding_from_lengths(align.lengths, align.width)
            source = align.front(source).masked_fill(source_padding_mask.unsqueeze(-1), 0.0)
        values = activated_linear(source, self.values.weight, self.values.bias, self.config.activation)
        return CrossAttentionState(self.keys(source), values, source_padding_mask, 0)

    def forward(
        self,
        x: Tensor,
        source: Optional[Tensor] = None,
        state: Optional[CrossAttentionState] = None,
        padding_mask: Optional[Tensor] = None,
        source_padding_mask: Optional[Tensor] = None,
    ) -> Tuple[Tensor, CrossAttentionState]:
        c = self.config
        check_sequence("x", x, c.dim, self.queries.weight)
        check_padding_mask(padding_mask, x)
        check_state_type(state, CrossAttentionState)
        if source_padding_mask is not None and source is None:
            raise ValueError(
                "source_padding_mask was given without source; give both, or neither where there is a state"
            )
        if state is None:
            if source is None:
                raise ValueError("source is None and there is no state; the first call needs the encoder's output")
            state = self.project_source(source, source_padding_mask)
        if state.keys.size(0) != x.size(0):
            raise ValueError(
                f"x is of {x.size(0)} sequences and the source of {state.keys.size(0)}; give each target its own "
                "source: select the same rows of both"
            )
        check_state_shape("state.keys", state.keys, (x.size(0), "source length", c.shared_dim))
        check_state_shape("state.values", state.values, (x.size(0), state.keys.size(1), c.dim))
        if padding_mask is not None:
            x = x.masked_fill(padding_mask.unsqueeze(-1), 0.0)
        dropout, attention_dropout, hidden_dropout = (
            (c.dropout, c.attention_dropout, c.hidden_dropout) if self.training else (0.0, 0.0, 0.0)
        )

        residual = x
        if c.prenorm:
            x = self.norm(x)
        values = dropped(state.values, hidden_dropout, c.feature_dropout)
        queries, place, state = _by_position(self.queries(x), padding_mask, state)  # (B, n', z)
        attended = attend(
            queries,
            state.keys,
            values,
            self.position_bias,
            state.position - queries.size(1),
            c.attention,
            key_padding=state.padding,
            dropout=attention_dropout,
        )
        attended = place(attended)  # (B, n, D)
        shape = (x.size(0), 1, x.size(2)) if c.feature_dropout else x.shape
        keep, scale = keep_mask(shape, dropout, x.device)
        gates, hidden = (self.gates.weight, self.gates.bias), (self.hidden.weight, self.hidden.bias)
        y = gated_output(x, attended, residual, gates, hidden, c.activation, keep, scale)
        if not c.prenorm:
            y = self.norm(y)
        return (y if padding_mask is None else y.masked_fill(padding_mask.unsqueeze(-1), 0.0)), state


def _by_position(queries: Tensor, padding_mask: Optional[Tensor], state: CrossAttentionState):
    """Lays queries out by absolute position, last one at the new position; also the way back and the next state."""
    new, source = queries.size(1), state[:3]
    if padding_mask is None and state.lengths is None:
        return queries, lambda out: out, CrossAttentionState(*source, state.position + new)
    # Rows stand at different positions: lay each one out from position 0, with blanks for what it has seen already.
    past = queries.new_zeros((queries.size(0), state.position), dtype=torch.bool)
    if state.lengths is not None:
        past = padding_from_lengths(state.lengths, state.position)
    pads = queries.new_zeros(queries.shape[:2], dtype=torch.bool) if padding_mask is None else padding_mask
    align = Alignment.of(torch.cat([past, pads], 1), crop=True)
    blanks = queries.new_zeros(queries.size(0), state.position, queries.size(2))
    laid_out = align.front(torch.cat([blanks, queries], 1))
    return laid_out, lambda out: align.back(out)[:, -new:], CrossAttentionState(*source, align.width, align.lengths)
