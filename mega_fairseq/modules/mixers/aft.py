"""AFT (Zhai et al. 2021, An Attention Free Transformer): attention without queries, with weights by distance.

For channel i of head h = floor(i H / d), with R = sigmoid(X W_r + b_r) and K, V = linear(d, d):

    M(X)_t = W_o (gamma_t R_t * sum_u e^(a_tu) v_u / sum_u e^(a_tu)) + b_o

    window   a_tu = w_h(t - u) + log beta_h(u) + k_u over the tokens of a chunk; gamma and beta are optional
    local    a_tu = w_h(t - u) + k_u for distances below `reach`, and k_u for all tokens before, with a constant state
    simple   a_tu = k_u
"""

from dataclasses import dataclass
from typing import Dict, NamedTuple, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mega_fairseq.modules.config import setting
from mega_fairseq.modules.mixer import Batch, MixerStep
from mega_fairseq.modules.mixer_state import MixerState, OpenChunk, Shape
from mega_fairseq.modules.projection import linear, side_by_side
from mega_fairseq.modules.time_tables import TimeConfig, TimeMixer, distance_table
from mega_fairseq.ops.aft import Sums, aft, aft_last_row, as_token, no_sums, with_tokens
from mega_fairseq.ops.attention.chunks import KeyValues
from mega_fairseq.ops.dropout import dropped
from mega_fairseq.ops.linear import ready_linear
from mega_fairseq.ops.precision import at_least_float32
from mega_fairseq.ops.sequence_parallel import Slices

FORMS = ("window", "local", "simple")


@dataclass(frozen=True)
class AFTConfig(TimeConfig):
    """Options of AFT."""

    form: str = setting(
        "window",
        "AFT's weights: tables over a chunk (window), tables over the last tokens (local), or none (simple)",
        "{side}_aft_form",
        choices=FORMS,
    )
    reach: Optional[int] = setting(None, "how many tokens AFT-local learns weights for", "{side}_aft_reach", "r")

    ONLY_WITH = {
        "chunk_size": ("form", ("window",)),
        "heads": ("form", ("window", "local")),
        "beta": ("form", ("window",)),
        "gamma": ("form", ("window",)),
        "reach": ("form", ("local",)),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.form == "local" and self.reach is None:
            raise ValueError(
                f"{self.name('reach')} is {self.written(None)} and {self.name('form')} local learns a weight "
                "for each of the last tokens; give their number, such as 32"
            )
        if self.reach is not None:
            self.check_positive("reach")
        if not self.is_unused("heads"):
            self.check_heads(self.dim, "width of the model")

    @property
    def tabled(self) -> bool:
        return self.form == "window"

    def build(self) -> "AttentionFree":
        return WindowedAFT(self) if self.form == "window" else LocalAFT(self)


class AttentionFree(TimeMixer):
    """What all forms share: projections, gate and values."""

    def __init__(self, config: AFTConfig):
        super().__init__(config)
        c = config
        self.receptance = linear(c.dim, c.dim, c.init)
        self.key = linear(c.dim, c.dim, c.init)
        self.value = linear(c.dim, c.dim, c.init)
        self.output = linear(c.dim, c.dim, c.init)

    def mix(self, x: Tensor, batch: Batch) -> Tuple[Tensor, Optional[Tuple]]:
        c = self.config
        values = dropped(self.value(x), self.rate(c.hidden_dropout), c.feature_dropout)
        mixed, state = self.weighted(self.key(x), values, batch)
        return self.output(torch.sigmoid(self.receptance(x)) * mixed), state

    def weighted(self, k: Tensor, v: Tensor, batch: Batch) -> Tuple[Tensor, Optional[Tuple]]:
        """gamma_t times the weighted mean of the values: k, v (B, L, D) -> (B, L, D), and the next state."""
        raise NotImplementedError


def _of_channels(table: Tensor, dim: int) -> Tensor:
    """A table of heads by channels: (H, n) -> (n, D)."""
    return table.t().repeat_interleave(dim // table.size(0), 1)


# ------------------------------------------------------------------------------------------- windows


class WindowedAFT(AttentionFree):
    """AFT inside chunks, with tables over the places of a chunk."""

    State = OpenChunk

    def __init__(self, config: AFTConfig):
        super().__init__(config)
        c, places = config, config.chunk_size
        self.log_weight = distance_table(c, places, logarithm=True)
        self.log_beta = nn.Parameter(torch.zeros(c.heads, places)) if c.beta else None
        self.gamma = nn.Parameter(torch.ones(places)) if c.gamma else None

    def weighted(self, k: Tensor, v: Tensor, batch: Batch) -> Tuple[Tensor, Optional[OpenChunk]]:
        return self.in_open_chunk(self.attend, k[..., :0], k, v, batch)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, padding: Optional[Tensor]) -> Tensor:
        """The rows of q (G, n, 0) in groups of keys and values (G, m, D), the last at the place of the last key."""
        queries, keys = q.size(1), k.size(1)
        if self.log_beta is not None:
            k = k.to(at_least_float32(k.dtype)) + _of_channels(self.log_beta[:, :keys], k.size(2))
        mixed = aft(k, v, self.log_weight, self.config.causal, queries, padding)
        if self.gamma is not None:
            mixed = mixed * self.gamma[keys - queries : keys].unsqueeze(1)
        return mixed

    def state_shapes(self) -> Dict[str, Shape]:
        return self.cache_shapes(self.config.dim, self.config.dim)

    def step(self) -> MixerStep:
        return WindowStep(self)


# ------------------------------------------------------------------------------------------- the whole past


class LocalState(NamedTuple):
    """The last reach - 1 tokens, and the sums over all tokens before them."""

    cache: KeyValues  # (B, reach - 1, D); where a row has fewer tokens, keys of the lowest number come first
    older: Sums


class LocalAFT(AttentionFree):
    """AFT over the whole past, with learned weights for the last tokens; AFT-simple has none."""

    State = LocalState

    def __init__(self, config: AFTConfig):
        super().__init__(config)
        self.log_weight = None
        if config.form == "local":
            # The curves end at 0, the weight of all older tokens. If they started there, as in a window, old tokens
            # would outweigh the last ones; a small model then learned far more slowly.
            self.log_weight = distance_table(config, config.reach, logarithm=True)
            with torch.no_grad():
                self.log_weight -= self.log_weight[:, -1:].clone()

    def adapt(self, stored: Dict[str, Tensor], prefix: str) -> None:
        table, own = stored.get(f"{prefix}log_weight"), self.log_weight
        if table is not None and own is not None and table.size(-1) != own.size(-1):
            name = self.config.name("reach")
            learned = table.size(-1) if self.config.causal else (table.size(-1) + 1) // 2
            raise ValueError(
                f"{name} is {self.config.reach} and this model learned weights for the last {learned} tokens; "
                f"evaluate with {name} {learned}"
            )

    @property
    def remembered(self) -> int:
        """How many tokens have to be kept one by one."""
        return self.config.reach - 1 if self.config.form == "local" else 0

    def weighted(self, k: Tensor, v: Tensor, batch: Batch) -> Tuple[Tensor, Optional[LocalState]]:
        weight = k.new_zeros(1, 1) if self.log_weight is None else self.log_weight
        if not self.config.causal:
            return aft(k, v, weight, False, None, batch.padding), None
        queries, older, state, after = k.size(1), no_sums(k), batch.state, None
        if batch.slices is not None:
            state, after = self.entering(self.next_state(k, v, older, queries, None), batch.slices, state)
        if state is not None:
            cache, older = state
            k, v = torch.cat([cache.keys, k], 1), torch.cat([cache.values, v], 1)
        mixed = aft(k, v, weight, True, queries, None, None if state is None else older)
        return mixed, after or self.next_state(k, v, older, queries, batch.lengths)

    def entering(self, own: LocalState, slices: Slices, before: Optional[LocalState]) -> Tuple[LocalState, LocalState]:
        """The state before this process's slice, and after all slices, from the state of each slice from zero.

        What is older in a slice goes to the others as one token with the same effect.
        """
        kept, lowest = min(self.remembered, slices.width), torch.finfo(own.older.largest.dtype).min
        sums = torch.stack(as_token(own.older), 1).unsqueeze(2)  # (B, 2, 1, D)
        every = slices.gather(torch.cat([sums, torch.stack(own.cache[:2], 1)], 2))  # (S, B, 2, reach, D)
        every = every.permute(2, 1, 0, 3, 4)  # (2, B, S, reach, D)
        of_older, last = every[:, :, :, 0], every[..., every.size(3) - kept :, :].to(own.cache.keys.dtype)

        def after(count: int) -> LocalState:
            k, v = last[:, :, :count].flatten(2, 3)  # (B, tokens, D) each
            state = before or self.next_state(k[:, :0], v[:, :0], no_sums(k), 0, None)
            # An absent token goes first, since there may be no other.
            older_k, older_v = (F.pad(t[:, :count], (0, 0, 1, 0), value=x) for t, x in zip(of_older, (lowest, 0.0)))
            older = with_tokens(state.older, older_k, older_v)
            return self.next_state(
                *(torch.cat(pair, 1) for pair in zip(state.cache[:2], (k, v))), older, k.size(1), None
            )

        return after(slices.rank), after(slices.group.size)

    def check_slices(self) -> None:
        """Any sequence can be shared: there are no chunks, and the state is constant."""

    def next_state(self, k: Tensor, v: Tensor, older: Sums, new: int, lengths: Optional[Tensor]) -> LocalState:
        """The state after k, v (B, m, D), the cached tokens if any and `new` ones, of which `lengths` are real."""
        kept, lowest = self.remembered, torch.finfo(k.dtype).min
        missing = new + kept - k.size(1)  # without a cache, tokens to put in front
        leaving = k.size(1) - kept  # tokens that are too far away now
        if lengths is None:
            older = with_tokens(older, k[:, : max(0, leaving)], v[:, : max(0, leaving)])
            front = max(0, -leaving)
            k, v = k[:, max(0, leaving) :], v[:, max(0, leaving) :]
            keys, values = F.pad(k, (0, 0, front, 0), value=lowest), F.pad(v, (0, 0, front, 0))  # copies, not views
            return LocalState(KeyValues(keys, values), older)
        counts = lengths - missing
        older = with_tokens(older, k, v, counts.clamp_min(0))
        index = counts.unsqueeze(1) + torch.arange(kept, device=k.device)  # (B, reach - 1)
        absent = (index < 0).unsqueeze(-1)
        index = index.clamp_min(0).unsqueeze(-1).expand(-1, -1, k.size(2))
        keys, values = k.gather(1, index).masked_fill(absent, lowest), v.gather(1, index).masked_fill(absent, 0.0)
        return LocalState(KeyValues(keys, values), older)

    def state_shapes(self) -> Dict[str, Shape]:
        dim = self.config.dim
        tokens = {f"cache.{name}": (self.remembered, dim) for name in ("keys", "values")}
        return {**tokens, **{f"older.{name}": (dim,) for name in Sums._fields}}

    def step(self) -> MixerStep:
        return LocalStep(self)


# ------------------------------------------------------------------------------------------- single tokens


class AttentionFreeStep(MixerStep):
    """AFT for one token, with one projection for R, K and V."""

    def __init__(self, module: AttentionFree):
        super().__init__(module)
        self.projection = side_by_side(module.receptance, module.key, module.value)
        self.output = ready_linear(module.output.weight, module.output.bias)

    def mix(self, x: Tensor, residual: Tensor, state: MixerState) -> Tuple[Tensor, MixerState]:
        receptance, k, v = self.projection(x).chunk(3, -1)
        mixed, state = self.weighted(k, v, state)
        return self.output(torch.sigmoid(receptance) * mixed), state

    def weighted(self, k: Tensor, v: Tensor, state: MixerState) -> Tuple[Tensor, MixerState]:
        """`AttentionFree.weighted` for k, v (R, D)."""
        raise NotImplementedError


class WindowStep(AttentionFreeStep):
    def __init__(self, module: WindowedAFT):
        super().__init__(module)
        dim = self.config.dim
        wide = at_least_float32(module.log_weight.dtype)
        self.weight = _of_channels(module.log_weight, dim).flip(0).to(wide)
        self.beta = None if module.log_beta is None else _of_channels(module.log_beta, dim).to(wide)
        self.gamma = module.gamma

    def weighted(self, k: Tensor, v: Tensor, state: OpenChunk) -> Tuple[Tensor, OpenChunk]:
        places = self.config.chunk_size
        cache = state.cache.append(k.unsqueeze(1), v.unsqueeze(1), places)
        tokens = cache.keys.size(1)
        weight = self.weight[places - tokens :]
        if self.beta is not None:
            weight = weight + self.beta[:tokens]
        mixed = aft_last_row(cache.keys, cache.values, weight)
        if self.gamma is not None:
            mixed = mixed * self.gamma[tokens - 1]
        return mixed, OpenChunk(cache.unless_complete(places))


class LocalStep(AttentionFreeStep):
    def __init__(self, module: LocalAFT):
        super().__init__(module)
        table = module.key.weight.new_zeros(1, 1) if module.log_weight is None else module.log_weight
        self.weight = _of_channels(table, self.config.dim).flip(0)

    def weighted(self, k: Tensor, v: Tensor, state: LocalState) -> Tuple[Tensor, LocalState]:
        cache, older = state
        k, v = (torch.cat([old, new.unsqueeze(1)], 1) for old, new in zip(cache[:2], (k, v)))
        mixed = aft_last_row(k, v, self.weight, older)
        return mixed, LocalState(KeyValues(k[:, 1:], v[:, 1:]), with_tokens(older, k[:, :1], v[:, :1]))
