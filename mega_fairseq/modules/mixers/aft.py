"""AFT (Zhai et al. 2021, An Attention Free Transformer): attention without queries, with weights by distance.

For channel i of head h = floor(i H / d), with R = sigmoid(X W_r + b_r) and K, V = linear(d, d):

    M(X)_t = W_o (gamma_t R_t * sum_u e^(a_tu) v_u / sum_u e^(a_tu)) + b_o

    window   a_tu = w_h(t - u) + log beta_h(u) + k_u over the tokens of a chunk; gamma and beta are optional
    local    a_tu = w_h(t - u) + k_u for distances below `reach`, and k_u for all tokens before, with a constant state
    simple   a_tu = k_u
"""

from dataclasses import dataclass
from typing import Callable, Dict, NamedTuple, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mega_fairseq.modules.config import inherited, setting
from mega_fairseq.modules.mixer import Batch, MixerStep
from mega_fairseq.modules.mixer_state import MixerState, OpenChunk, Shape
from mega_fairseq.modules.projection import linear, packed, project
from mega_fairseq.modules.time_tables import TimeConfig, TimeMixer, curves
from mega_fairseq.ops.aft import aft, aft_last_row, of_channels
from mega_fairseq.ops.aft.sums import Sums, no_sums, with_tokens
from mega_fairseq.ops.attention.chunks import KeyValues
from mega_fairseq.ops.precision import at_least_float32

FORMS = ("window", "local", "simple")
WeighToken = Callable[[Tensor, Tensor, MixerState], Tuple[Tensor, MixerState]]  # `weighted` for k, v (R, D)


@dataclass(frozen=True)
class AFTConfig(TimeConfig):
    """Options of AFT."""

    form: str = setting(
        "window",
        "AFT's weights: tables over a chunk (window), tables over the last tokens (local), or none (simple)",
        "{side}_aft_form",
        choices=FORMS,
    )
    reach: Optional[int] = setting(
        None, "how many tokens AFT-local learns weights for", "{side}_aft_reach", only_with=("form", "local")
    )
    chunk_size: Optional[int] = inherited(TimeConfig, "chunk_size", only_with=("form", "window"))
    heads: int = inherited(TimeConfig, "heads", only_with=("form", "window", "local"))
    beta: bool = inherited(TimeConfig, "beta", only_with=("form", "window"))
    gamma: bool = inherited(TimeConfig, "gamma", only_with=("form", "window"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.form == "local" and self.reach is None:
            raise ValueError(
                f"{self.name('reach')} is {self.written(None)} and {self.name('form')} local learns a weight "
                "for each of the last tokens; give their number, such as 32"
            )
        if self.reach is not None:
            self.check_positive("reach")
        if self.form != "simple":
            self.check_heads(self.dim, "width of the model")

    @property
    def tabled(self) -> bool:
        return self.form == "window"

    def build(self) -> "AttentionFree":
        return WindowedAFT(self) if self.form == "window" else LocalAFT(self)


EXAMPLES = {
    "aft": AFTConfig(4, heads=2, chunk_size=6, beta=True, gamma=True),
    "aft, local": AFTConfig(4, form="local", reach=4, heads=2, token_shift=True),
    "aft, simple": AFTConfig(4, form="simple"),
}


class AttentionFree(TimeMixer):
    """What all forms share: projections, gate and values.

    A form defines `weighted(k, v, batch)`, gamma_t times the weighted mean of the values: k, v (B, L, D) -> (B, L, D),
    and the next state; and `weigh_token()`, the same for single tokens, with the current weights.
    """

    def __init__(self, config: AFTConfig):
        super().__init__(config)
        c = config
        self.receptance = linear(c.dim, c.dim, c.init)
        self.key = linear(c.dim, c.dim, c.init)
        self.value = linear(c.dim, c.dim, c.init)
        self.output = linear(c.dim, c.dim, c.init)

    def mix(self, x: Tensor, batch: Batch) -> Tuple[Tensor, Optional[Tuple]]:
        values = self.drop(project(self.value, x), self.config.hidden_dropout)
        mixed, state = self.weighted(project(self.key, x), values, batch)
        return project(self.output, torch.sigmoid(project(self.receptance, x)) * mixed), state

    def step(self) -> MixerStep:
        """AFT for one token, with one projection for R, K and V."""
        project, output = packed(self.receptance, self.key, self.value), packed(self.output)
        weigh = self.weigh_token()

        def mix(x: Tensor, residual: Tensor, state: MixerState) -> Tuple[Tensor, MixerState]:
            receptance, k, v = project(x).chunk(3, -1)
            mixed, state = weigh(k, v, state)
            return output(torch.sigmoid(receptance) * mixed), state

        return MixerStep(self, mix)


# ------------------------------------------------------------------------------------------- windows


class WindowedAFT(AttentionFree):
    """AFT inside chunks, with tables over the places of a chunk."""

    State = OpenChunk

    def __init__(self, config: AFTConfig):
        super().__init__(config)
        c, places = config, config.chunk_size
        self.log_weight = nn.Parameter(curves(c, places))
        self.log_beta = self.learned_table(c.beta, 0.0)
        self.gamma = nn.Parameter(torch.ones(places)) if c.gamma else None

    def weighted(self, k: Tensor, v: Tensor, batch: Batch) -> Tuple[Tensor, Optional[OpenChunk]]:
        return self.in_open_chunk(self.attend, k[..., :0], k, v, batch)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, padding: Optional[Tensor]) -> Tensor:
        """The rows of q (G, n, 0) in groups of keys and values (G, m, D), the last at the place of the last key."""
        queries, keys = q.size(1), k.size(1)
        if self.log_beta is not None:
            k = k.to(at_least_float32(k.dtype)) + of_channels(self.log_beta[:, :keys], k.size(2))
        mixed = aft(k, v, self.log_weight, self.config.causal, queries, padding)
        if self.gamma is not None:
            mixed = mixed * self.gamma[keys - queries : keys].unsqueeze(1)
        return mixed

    def weigh_token(self) -> WeighToken:
        dim, places, wide = self.config.dim, self.config.chunk_size, at_least_float32(self.log_weight.dtype)
        weights = of_channels(self.log_weight, dim).flip(0).to(wide)
        beta = None if self.log_beta is None else of_channels(self.log_beta, dim).to(wide)

        def weigh(k: Tensor, v: Tensor, state: OpenChunk) -> Tuple[Tensor, OpenChunk]:
            cache = state.cache.append(k.unsqueeze(1), v.unsqueeze(1), places)
            tokens = cache.keys.size(1)
            weight = weights[places - tokens :]
            if beta is not None:
                weight = weight + beta[:tokens]
            mixed = aft_last_row(cache.keys, cache.values, weight)
            if self.gamma is not None:
                mixed = mixed * self.gamma[tokens - 1]
            return mixed, OpenChunk(cache.unless_complete(places))

        return weigh


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
            weight = curves(config, config.reach)
            self.log_weight = nn.Parameter(weight - weight[:, -1:])

    @property
    def remembered(self) -> int:
        """How many tokens have to be kept one by one."""
        return self.config.reach - 1 if self.config.form == "local" else 0

    def weighted(self, k: Tensor, v: Tensor, batch: Batch) -> Tuple[Tensor, Optional[LocalState]]:
        weight = k.new_zeros(1, 1) if self.log_weight is None else self.log_weight
        if not self.config.causal:
            return aft(k, v, weight, False, None, batch.padding), None
        queries, older, sums = k.size(1), no_sums(k), None
        if batch.state is not None:
            cache, older = batch.state
            k, v, sums = torch.cat([cache.keys, k], 1), torch.cat([cache.values, v], 1), older
        mixed = aft(k, v, weight, True, queries, None, sums)
        return mixed, self.next_state(k, v, older, queries, batch.lengths)

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

    def weigh_token(self) -> WeighToken:
        weights = None if self.log_weight is None else of_channels(self.log_weight, self.config.dim).flip(0)

        def weigh(k: Tensor, v: Tensor, state: LocalState) -> Tuple[Tensor, LocalState]:
            cache, older = state
            k, v = torch.cat([cache.keys, k.unsqueeze(1)], 1), torch.cat([cache.values, v.unsqueeze(1)], 1)
            mixed = aft_last_row(k, v, torch.zeros_like(k[0]) if weights is None else weights, older)
            return mixed, LocalState(KeyValues(k[:, 1:], v[:, 1:]), with_tokens(older, k[:, :1], v[:, :1]))

        return weigh
