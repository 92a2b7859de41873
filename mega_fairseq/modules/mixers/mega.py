"""Moving average equipped gated attention, Mega's token mixer (paper, section 3.2, eq. 6-15)."""

from dataclasses import dataclass
from typing import Dict, NamedTuple, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mega_fairseq.modules.attend import TabledBias, biased_weights
from mega_fairseq.modules.config import setting
from mega_fairseq.modules.damped_ema import DampedEMA, check_truncation
from mega_fairseq.modules.description import Description, decays
from mega_fairseq.modules.mixer import Batch, MixerStep
from mega_fairseq.modules.mixer_state import Shape
from mega_fairseq.modules.projection import linear, side_by_side
from mega_fairseq.modules.single_head import SingleHeadConfig, SingleHeadMixer, initialize_scales, position_bias
from mega_fairseq.ops.activations import ACTIVATIONS
from mega_fairseq.ops.attention import weighted_sum
from mega_fairseq.ops.attention.chunks import KeyValues
from mega_fairseq.ops.dropout import dropped, keep_mask
from mega_fairseq.ops.ema import ema, ema_window_step, window_taps
from mega_fairseq.ops.gates import activated_linear, gated_output
from mega_fairseq.ops.linear import ready_linear
from mega_fairseq.ops.precision import at_least_float32


@dataclass(frozen=True)
class GatedAttentionConfig(SingleHeadConfig):
    """Options of moving average equipped gated attention (eq. 6-15)."""

    ndim: int = setting(16, "size of the EMA's state for each channel", "{side}_n_dim", "N")
    truncation: Optional[int] = setting(
        None,
        "how many steps the EMA looks back; 0 for no limit",
        "{side}_truncation_length",
        fallback="truncation_length",
    )
    attention: str = setting("softmax", "attention function", "attention_activation_fn")  # f of eq. 11
    activation: str = setting("silu", "activation of values and candidate, not of the gates", "activation_fn")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_choice("activation", ACTIVATIONS)
        self.check_positive("ndim")
        check_truncation(self.truncation, self.name("truncation"))

    def build(self) -> "MovingAverageGatedAttention":
        return MovingAverageGatedAttention(self)


class GatedAttentionState(NamedTuple):
    """The state of a causal layer: the EMA's, and the keys and values of the unfinished chunk."""

    ema: Tensor  # (B, D, N), or the last inputs (B, D, T - 1) if it is truncated to T taps
    cache: KeyValues  # keys (B, m, z), values (B, m, v); without chunks, of all tokens


class MovingAverageGatedAttention(SingleHeadMixer):
    """Mega's token mixer, including its gates and residual connection."""

    State = GatedAttentionState
    PARTS = {"ema": "EMA"}
    gated_residual = True

    def __init__(self, config: GatedAttentionConfig):
        super().__init__(config)
        c = config
        self.ema = DampedEMA(c.dim, c.ndim, bidirectional=not c.causal, truncation=c.truncation)
        self.values = linear(c.dim, c.value_dim, c.init)
        self.shared = linear(c.dim, c.shared_dim, c.init)
        self.gates = linear(c.dim, c.dim + c.value_dim + c.dim, c.init)  # update, reset, candidate
        self.hidden = linear(c.value_dim, c.dim, c.init)  # U_h
        self.kappa = nn.Parameter(torch.empty(2, c.shared_dim))
        self.mu = nn.Parameter(torch.zeros(2, c.shared_dim))
        initialize_scales(self.kappa, c.init)
        self.position_bias = position_bias(c)

    def mix(self, x: Tensor, batch: Batch) -> Tuple[Tensor, Optional[GatedAttentionState]]:
        c, state = self.config, batch.state
        values = activated_linear(x, self.values.weight, self.values.bias, c.activation)  # V (B, L, v), eq. 10
        values = dropped(values, self.rate(c.hidden_dropout), c.feature_dropout)

        averaged = self.ema.aligned(x, None if state is None else state.ema, batch.lengths, batch.slices)
        x, ema_state = averaged if c.causal else (averaged, None)
        x = dropped(x, self.rate(c.dropout), c.feature_dropout)  # X' (B, L, D), eq. 6
        shared = activated_linear(x, self.shared.weight, self.shared.bias)  # Z (B, L, z), eq. 7
        queries, keys = self.mapped(shared)  # eq. 8-9

        cache = None if state is None else state.cache
        attended, cache = self.in_chunks(self.attend, queries, keys, values, cache, batch)  # O (B, L, v), eq. 11

        shape = (x.size(0), 1, x.size(2)) if c.feature_dropout else x.shape
        keep, scale = keep_mask(shape, self.rate(c.dropout), x.device)
        gates, hidden = (self.gates.weight, self.gates.bias), (self.hidden.weight, self.hidden.bias)
        y = gated_output(x, attended, batch.residual, gates, hidden, c.activation, keep, scale)  # Y, eq. 12-15
        return y, GatedAttentionState(ema_state, cache) if c.causal else None

    def state_shapes(self) -> Dict[str, Shape]:
        c = self.config
        return {"ema": self.ema.state_shape(), **self.cache_shapes(c.shared_dim, c.value_dim)}

    def step(self) -> "GatedAttentionStep":
        return GatedAttentionStep(self)

    def describe(self, most: int) -> Description:
        return [*decays(self.ema.alpha, self.ema.delta), *super().describe(most)]


class GatedAttentionStep(MixerStep):
    """Eq. 6-15 for one token, with one projection of X' for Z and all gates."""

    def __init__(self, module: MovingAverageGatedAttention):
        super().__init__(module)
        c = self.config
        self.kappa, self.mu = module.kappa, module.mu
        self.activation = ACTIVATIONS[c.activation].forward
        (self.coefficients,) = module.ema.coefficients()
        self.taps = window_taps(self.coefficients, c.truncation) if c.truncation else None
        self.omega = module.ema.omega.to(at_least_float32(module.ema.omega.dtype))
        self.values = ready_linear(module.values.weight, module.values.bias)
        self.projection = side_by_side(module.shared, module.gates)
        self.hidden = ready_linear(module.hidden.weight, module.hidden.bias)
        self.widths = (c.shared_dim, c.dim, c.value_dim, c.dim)
        self.position_bias = TabledBias(module.position_bias)

    def mix(self, x: Tensor, residual: Tensor, state: GatedAttentionState) -> Tuple[Tensor, GatedAttentionState]:
        c = self.config
        values = self.activation(self.values(x))  # V (R, v), eq. 10
        if self.taps is not None:
            x, ema_state = ema_window_step(x, self.taps, state.ema, self.omega)
        else:
            x, ema_state = ema(x.unsqueeze(1), self.coefficients, state.ema, self.omega)
            x = x.squeeze(1)
        projected = self.projection(F.silu(x))  # of X', eq. 6
        shared, update, reset, candidate = projected.split(self.widths, -1)
        shared = F.silu(shared)  # Z, eq. 7
        queries, keys = torch.addcmul(self.mu.unsqueeze(1), shared, self.kappa.unsqueeze(1))  # eq. 8-9
        cache = state.cache.append(keys.unsqueeze(1), values.unsqueeze(1), c.chunk_size)
        weights = biased_weights(
            queries.unsqueeze(1), cache.keys, self.position_bias, cache.keys.size(1) - 1, c.attention
        )
        attended = weighted_sum(weights, cache.values).squeeze(1)  # O (R, v), eq. 11
        hidden = self.hidden(F.silu(reset) * attended)
        y = torch.lerp(residual, self.activation(candidate + hidden), torch.sigmoid(update))  # eq. 12-15
        return y, GatedAttentionState(ema_state, cache.unless_complete(c.chunk_size))
