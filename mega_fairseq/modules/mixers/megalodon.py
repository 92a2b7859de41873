"""Megalodon's token mixer (Ma et al. 2024): timestep norm, complex EMA, normalised attention in chunks, gated output.

With X~ the timestep norm of X and M the RMS norm of its complex EMA (`ops/cema`):

    V = silu(X~ W_v + b_v),  Z = RMSNorm(M W_z + b_z) in each head
    Q = Z (1 + kappa_0) / sqrt(z / H) + mu_0,  K = Z (1 + kappa_1) / sqrt(z / H) + mu_1,  both turned by RoPE
    M(X) = M W_h + b_h + (softmax(Q K^T) V * silu(M W_r + b_r)) U_h

This is what the authors' code computes (docs/paper-deviations.md). Norms and kappa store their scale minus 1, so that
weight decay pulls scales to 1.
"""

import math
from dataclasses import dataclass
from typing import Callable, Dict, NamedTuple, Optional, Tuple, Union

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mega_fairseq.modules.config import setting
from mega_fairseq.modules.layer import Recurrence
from mega_fairseq.modules.mixer import Batch, ChunkedConfig, ChunkedMixer, MixerStep
from mega_fairseq.modules.mixer_state import Shape
from mega_fairseq.modules.projection import linear, packed, project, project_gated
from mega_fairseq.modules.timestep_norm import FinalNormConfig, TimestepNorm
from mega_fairseq.ops.attention import attention
from mega_fairseq.ops.attention.chunks import KeyValues
from mega_fairseq.ops.attention.heads import merge_heads, rotate_heads, split_heads
from mega_fairseq.ops.attention.one_position import head_weights_at_one_position, weighted_sum_by_head
from mega_fairseq.ops.cema import CEMACoefficients, cema, cema_coefficients, cema_token
from mega_fairseq.ops.cema.coefficients import complex_powers
from mega_fairseq.ops.ema.coefficients import log_decays
from mega_fairseq.ops.norm import normalized
from mega_fairseq.ops.padding import Padding, to_front
from mega_fairseq.ops.precision import at_least_float32
from mega_fairseq.ops.queries_keys import queries_keys
from mega_fairseq.ops.sequence_parallel import Slices, entering_state
from mega_fairseq.ops.timestep_norm import Statistics

EPS = 1e-5


@dataclass(frozen=True)
class MegalodonConfig(ChunkedConfig):
    """Options of Megalodon's mixer. Its norm is a timestep norm before the mixer, whatever the options of norms say."""

    shared_dim: int = setting(0, "width of queries and keys", "{side}_z_dim")  # 0: a quarter of dim
    value_dim: int = setting(0, "width of attention's values", "{side}_hidden_dim")  # 0: twice dim
    ndim: int = setting(16, "size of the EMA's state for each channel", "{side}_n_dim")
    heads: int = setting(1, "heads of Megalodon's attention", "{side}_megalodon_heads")
    groups: int = setting(
        0, "groups of channels with statistics of their own in timestep norms; 0 is one of 32", "{side}_norm_groups"
    )
    attention_dropout: float = setting(0.0, "dropout on attention weights", "attention_dropout")

    causal_only = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.set_default("shared_dim", self.dim // 4)
        self.set_default("value_dim", 2 * self.dim)
        self.set_default("groups", max(1, self.dim // 32))
        self.check_positive("shared_dim", "value_dim", "ndim", "groups")
        self.check_heads(self.shared_dim, "width of queries and keys")
        self.check_heads(self.value_dim, "width of values")
        if self.shared_dim // self.heads % 2:
            raise ValueError(
                f"{self.name('shared_dim')} is {self.shared_dim} for {self.heads} heads, and RoPE turns pairs of "
                "dimensions; give an even number for each head"
            )
        if self.dim % self.groups or self.dim == self.groups:
            raise ValueError(
                f"{self.name('groups')} is {self.groups}; give a divisor of the width of the model, {self.dim}, that "
                "leaves at least two channels in a group"
            )

    def final_norm(self, affine: bool) -> FinalNormConfig:
        return FinalNormConfig(self.dim, groups=self.groups, norm_affine=affine)

    def build(self) -> "Megalodon":
        return Megalodon(self)


EXAMPLES = {
    "megalodon": MegalodonConfig(4, shared_dim=2, value_dim=6, ndim=3, groups=2, chunk_size=6),
    "megalodon, heads": MegalodonConfig(
        4, shared_dim=4, value_dim=8, ndim=2, heads=2, groups=1, chunk_size=6, token_shift=True
    ),
    "megalodon, unbounded": MegalodonConfig(4, shared_dim=4, value_dim=4, ndim=2, groups=1),
}


class ComplexEMA(Recurrence):
    """EMA with complex states for each channel (`ops/cema`): `y, state = module(x, state, padding_mask)`."""

    def __init__(self, dim: int, ndim: int):
        super().__init__()
        self.alpha, self.delta = (nn.Parameter(0.2 * torch.randn(dim, ndim)) for _ in range(2))
        shares = dim ** (-torch.arange(1, dim + 1) / dim)  # of a turn: from slow to fast
        self.theta = nn.Parameter(torch.logit(shares, 1e-6)[torch.randperm(dim)])
        self.gamma = nn.Parameter(torch.stack([torch.randn(dim, ndim), torch.zeros(dim, ndim)], -1))
        self.omega = nn.Parameter((0.25 * torch.randn(dim)).clamp(-1.0, 1.0))

    def coefficients(self) -> CEMACoefficients:
        return cema_coefficients(self.alpha, self.delta, self.theta, self.gamma)

    def forward(
        self, x: Tensor, state: Optional[Tensor] = None, padding_mask: Optional[Padding] = None
    ) -> Tuple[Tensor, Tensor]:
        x, align, _ = to_front(x, padding_mask)
        y, state = cema(x, self.coefficients(), state, self.omega, None if align is None else align.lengths)
        return (y if align is None else align.back(y)), state

    def entering(self, x: Tensor, before: Optional[Tensor], slices: Slices) -> Tuple[Tensor, Tensor]:
        return entering_state(x, self.coefficients(), slices, before)

    def step(self) -> Callable[[Tensor, Tensor], Tuple[Tensor, Tensor]]:
        """The EMA for one token x (R, D) after a state, with its current coefficients."""
        c = self.coefficients()
        decay = complex_powers(c, 1)
        return lambda x, state: cema_token(x, c, state, self.omega, decay)


class ShiftedRMSNorm(nn.Module):
    """(1 + weight) x / rms(x)."""

    def __init__(self, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        return normalized(x, 1.0 + self.weight.to(at_least_float32(self.weight.dtype)), None, EPS, center=False)


class MegalodonState(NamedTuple):
    """The state of a layer: that of its norm and of its EMA, and the unfinished chunk."""

    norm: Statistics
    ema: Tensor  # (B, D, N, 2) real and imaginary parts
    cache: KeyValues  # rotated keys (B, m, z), values (B, m, v); without chunks, of all tokens


class Megalodon(ChunkedMixer):
    """Megalodon's token mixer."""

    State = MegalodonState
    norm_in_mix = True
    fixed_step = True

    def __init__(self, config: MegalodonConfig):
        super().__init__(config)
        c = config

        self.norm = TimestepNorm(c.dim, c.groups, EPS, c.norm_affine)
        self.cema, self.averaged_norm = ComplexEMA(c.dim, c.ndim), ShiftedRMSNorm(c.dim)
        self.shared, self.values = linear(c.dim, c.shared_dim, "scaled"), linear(c.dim, c.value_dim, "scaled")
        self.gate, self.direct = linear(c.dim, c.value_dim, "scaled"), linear(c.dim, c.dim, "scaled")
        self.hidden = nn.Linear(c.value_dim, c.dim, bias=False)
        nn.init.normal_(self.hidden.weight, std=c.value_dim**-0.5)
        if c.init == "released":  # N(0, 1 / (3 in))
            for layer in (self.shared, self.values, self.gate, self.direct, self.hidden):
                layer.weight.data.mul_(3**-0.5)
        self.kappa, self.mu = (nn.Parameter(torch.zeros(2, c.shared_dim)) for _ in range(2))  # of queries, of keys

    def mix(self, x: Tensor, batch: Batch) -> Tuple[Tensor, MegalodonState]:
        c, (norm_state, ema_state, cache) = self.config, batch.state or (None, None, None)
        x, norm_state = self.norm(x, norm_state, batch.align)  # X~ (B, L, D)
        averaged, ema_state = self.cema(x, ema_state, batch.align)
        averaged = self.drop(self.averaged_norm(averaged), c.hidden_dropout)  # M (B, L, D)
        values = project(self.values, x, "silu")  # V (B, L, v)
        place = 0 if cache is None else cache.place
        q, k = self.queries_keys(project(self.shared, averaged), place)  # (B, L, z) each
        attended, cache = self.in_chunks(self.attend, q, k, values, cache, batch)  # O (B, L, v)
        attended = self.drop(attended, c.hidden_dropout)
        y = project(self.direct, averaged) + project_gated(self.gate, self.hidden, averaged, attended, "silu")
        return y, MegalodonState(norm_state, ema_state, cache)

    def queries_keys(self, shared: Tensor, place: Union[int, Tensor]) -> Tuple[Tensor, Tensor]:
        """Q and K with RoPE at places from `place` on, from Z before its norm: (B, n, z) each."""
        c, width = self.config, self.config.shared_dim // self.config.heads
        z = normalized(shared.unflatten(-1, (c.heads, -1)), None, None, EPS, center=False).flatten(-2)
        q, k = queries_keys(z, ((1.0 + self.kappa) * width**-0.5).to(z.dtype), self.mu.to(z.dtype), "linear")
        return tuple(rotate_heads((q, k), place, c.heads, width, c.chunk_size))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, padding: Optional[Tensor]) -> Tensor:
        """Attention within chunks, with the last query at the place of the last key."""
        c, dropout = self.config, self.dropout_module.rate(self.config.attention_dropout)
        padding = None if padding is None else padding.repeat_interleave(c.heads, 0)
        q, k, v = (split_heads(t, c.heads) for t in (q, k, v))
        return merge_heads(attention(q, k, v, "softmax", True, None, padding, dropout, scale=1.0), c.heads)

    def state_shapes(self) -> Dict[str, Shape]:
        c = self.config
        norm = {"norm.count": (), "norm.mean": (c.groups,), "norm.var": (c.groups,)}
        return {**norm, "ema": (c.dim, c.ndim, 2), **self.cache_shapes(c.shared_dim, c.value_dim)}

    def log_decays(self) -> Dict[str, Tensor]:
        return {"": log_decays(self.cema.alpha, self.cema.delta)}

    def periods(self) -> Dict[str, Tensor]:
        return {"": 1.0 / self.cema.coefficients().turns}

    def step(self) -> MixerStep:
        """The mixer for one token, with one projection of M for Z, the gate and the direct output."""
        c, norm, average = self.config, self.norm.step(), self.cema.step()
        project_values, project_hidden = packed(self.values), packed(self.hidden)
        project, widths = packed(self.shared, self.gate, self.direct), (c.shared_dim, c.value_dim, c.dim)

        def mix(x: Tensor, residual: Tensor, state: MegalodonState) -> Tuple[Tensor, MegalodonState]:
            x, norm_state = norm(x, state.norm)  # X~ (R, D)
            averaged, ema_state = average(x, state.ema)
            shared, gate, direct = project(self.averaged_norm(averaged)).split(widths, -1)
            values = F.silu(project_values(x))  # V (R, v)
            q, k = self.queries_keys(shared.unsqueeze(1), state.cache.place)
            cache, unused = state.cache.append(k, values.unsqueeze(1), c.chunk_size), None
            if cache.padding is not None:
                unused = q.new_zeros(cache.padding.shape).masked_fill(cache.padding, -math.inf)
            q = q.squeeze(1) * (c.shared_dim // c.heads) ** 0.5  # by which the weights divide
            weights = head_weights_at_one_position(q, cache.keys, c.heads, unused)
            attended = weighted_sum_by_head(weights, cache.values)  # O (R, v)
            y = direct + project_hidden(attended * F.silu(gate))
            return y, MegalodonState(norm_state, ema_state, cache.unless_complete(c.chunk_size))

        return MixerStep(self, mix)
