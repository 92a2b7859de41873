"""Attention with a relative position bias, shared by self-attention and cross attention."""

from typing import Optional, Tuple

import torch
from torch import Tensor

from mega_fairseq.modules.config import ModuleConfig
from mega_fairseq.modules.position_bias import POSITION_BIASES, PositionBias
from mega_fairseq.ops.attention import (
    ATTENTION_FUNCTIONS,
    attention,
    fused_kernel_runs,
    needs_mask,
    weights_at_one_position,
)
from mega_fairseq.ops.attention.position import turned, turns


def check_attention(config: ModuleConfig) -> None:
    """Checks the options that single-head self-attention and cross attention share."""
    config.check_positive("shared_dim", "max_positions")
    config.check_choice("attention", ATTENTION_FUNCTIONS)
    config.check_choice("position_bias", POSITION_BIASES)
    if config.position_bias in ("rotary", "rope") and config.shared_dim % 2:
        width = config.name("shared_dim")
        raise ValueError(
            f"{config.name('position_bias')} {config.position_bias!r} rotates pairs of dimensions and {width} is "
            f"{config.shared_dim}; make {width} even"
        )


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    position_bias: PositionBias,
    first_query: int,
    function: str,
    causal: bool = False,
    key_padding: Optional[Tensor] = None,
    dropout: float = 0.0,
    outer: bool = False,
) -> Tensor:
    """f(Q K^T / tau + b_rel) V (eq. 11): q (G, n, z) at positions first_query, ...; k (G, m, z), v (G, m, e) from 0.

    If a fused kernel can run, a bias that has the form of extra columns of q and k is used as such, since the kernel
    would need any other bias as a matrix. Otherwise the bias is a vector over distances. `outer` is as in `attention`.
    """
    queries, keys = q.size(1), k.size(1)
    q, k = position_bias.rotate(q, first_query), position_bias.rotate(k, 0)
    columns, bias, extra = None, None, position_bias.extra_columns
    masked = needs_mask(queries, keys, causal, key_padding)
    if extra and fused_kernel_runs(q, v, function, extra, dropout, masked):
        columns = position_bias.columns(first_query, queries, keys)
    else:
        bias = position_bias(1 - queries - first_query, keys - first_query, q.device)
    return attention(q, k, v, function, causal, bias, columns, key_padding, dropout, outer=outer)


def biased_weights(
    q: Tensor,
    k: Tensor,
    position_bias: PositionBias,
    position: int,
    function: str,
    key_padding: Optional[Tensor] = None,
    outer: bool = False,
) -> Tensor:
    """f(Q K^T / tau + b_rel) for queries (G, n, z) that are all at `position` -> (G, n, m), for `weighted_sum`."""
    q_rows = position_bias.rotate(q.reshape(-1, 1, q.size(-1)), position)
    bias = position_bias(-position, k.size(1) - position, q.device)  # (m,)
    rotated = position_bias.rotate(k, 0)
    return weights_at_one_position(q_rows.view_as(q), rotated, function, bias, key_padding, outer=outer)


class TabledBias:
    """A position bias with tables of its scores and turns, so that they are not recomputed for each token."""

    def __init__(self, bias: PositionBias):
        self.bias = bias
        # Each is replaced as a whole: threads may share it.
        self.tabled: Tuple[int, int, Optional[Tensor]] = (0, 0, None)
        self.turns: Optional[Tuple[Tensor, Tensor]] = None

    def __call__(self, first: int, stop: int, device: torch.device) -> Optional[Tensor]:
        if self.bias.longest is not None:  # the bias is already a table
            return self.bias(first, stop, device)
        start, end, table = self.tabled
        if first < start or stop > end:
            start, end = min(2 * first, start), max(2 * stop, end)
            table = self.bias(start, end, device)
            self.tabled = (start, end, table)
        return None if table is None else table[first - start : stop - start]

    def rotate(self, x: Tensor, first: int) -> Tensor:
        if not self.bias.rotates:
            return x
        stop, tables = first + x.size(1), self.turns
        if tables is None or len(tables[0]) < stop:
            tables = self.turns = turns(torch.arange(2 * stop, device=x.device), x.size(-1), x.dtype)
        return turned(x, *(table[first:stop] for table in tables))
