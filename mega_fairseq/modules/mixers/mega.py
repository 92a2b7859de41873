"""Moving average equipped gated attention, Mega's token mixer (paper, section 3.2, eq. 6-15), and its damped EMA."""

from dataclasses import dataclass
from typing import Callable, Dict, NamedTuple, Optional, Tuple, Union

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mega_fairseq.modules.config import check_positive, setting
from mega_fairseq.modules.layer import Recurrence, check_padding_mask
from mega_fairseq.modules.mixer import Batch, MixerStep
from mega_fairseq.modules.mixer_state import Shape
from mega_fairseq.modules.position_bias import TabledBias, attend_token
from mega_fairseq.modules.projection import gated_residual, linear, packed, project
from mega_fairseq.modules.single_head import SingleHeadConfig, SingleHeadMixer
from mega_fairseq.ops.activations import ACTIVATIONS
from mega_fairseq.ops.attention import ATTENTION_FUNCTIONS
from mega_fairseq.ops.attention.chunks import KeyValues
from mega_fairseq.ops.ema import EMACoefficients, ema, ema_coefficients, ema_token, window_taps
from mega_fairseq.ops.ema.coefficients import log_decays
from mega_fairseq.ops.gates import gate_output
from mega_fairseq.ops.padding import Padding, to_front
from mega_fairseq.ops.queries_keys import queries_keys
from mega_fairseq.ops.sequence_parallel import Slices, entering_state


class DampedEMA(Recurrence):
    """silu(EMA(x) + omega x) with a multi-dimensional damped EMA for each channel (eq. 3-5): (B, L, D) -> (B, L, D).

    Causal: `y, state = module(x, state, padding_mask)`. Bidirectional: `y = module(x, padding_mask=...)`. The released
    code has omega and silu, not the paper.
    """

    def __init__(self, dim: int, ndim: int = 16, bidirectional: bool = False, truncation: Optional[int] = None):
        super().__init__()
        check_positive(dim=dim, ndim=ndim)
        check_truncation(truncation)
        self.dim, self.ndim, self.bidirectional, self.truncation = dim, ndim, bidirectional, truncation
        directions = 2 if bidirectional else 1
        tables = (nn.Parameter(torch.empty(directions, dim, ndim)) for _ in range(4))
        # Logits of alpha (input weight) and delta (damping); the released code has these two names swapped.
        self.alpha, self.delta, self.beta, self.eta = tables
        self.omega = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws new parameters, as the released code does."""
        nn.init.normal_(self.alpha, std=0.2)
        nn.init.normal_(self.delta, std=0.2)
        nn.init.normal_(self.beta, std=0.02)
        with torch.no_grad():  # +1, -1, +1, ...: alternating signs in the hidden state
            self.beta[..., 0::2] += 1.0
            self.beta[..., 1::2] -= 1.0
        nn.init.normal_(self.eta)
        nn.init.normal_(self.omega)

    def coefficients(self) -> EMACoefficients:
        """The coefficients of the recurrence, from the present parameters."""
        return ema_coefficients(self.alpha, self.delta, self.beta, self.eta)

    def forward(
        self, x: Tensor, state: Optional[Tensor] = None, padding_mask: Optional[Padding] = None
    ) -> Union[Tensor, Tuple[Tensor, Tensor]]:
        check_padding_mask(padding_mask, x)
        if state is not None:
            self._check_state(state, x)
        x, align, _ = to_front(x, padding_mask)
        lengths = None if align is None else align.lengths
        y, state = ema(x, self.coefficients(), state, self.omega, lengths, self.truncation)
        y = F.silu(y)
        y = y if align is None else align.back(y)
        return y if self.bidirectional else (y, state)

    def _check_state(self, state: Tensor, x: Tensor) -> None:
        """Refuses states that would be broadcast."""
        if self.bidirectional:
            raise ValueError("a bidirectional EMA has no state; build it with bidirectional=False to stream")
        expected = (x.size(0), *self.state_shape())
        if state.shape != expected:
            raise ValueError(f"the EMA state has shape {tuple(state.shape)}; it must be {expected}")

    def state_shape(self) -> Tuple[int, int]:
        """The shape for one row: (D, N), or (D, T - 1) for the inputs that T taps still reach."""
        return self.dim, self.truncation - 1 if self.truncation else self.ndim

    def step(self) -> Callable[[Tensor, Tensor], Tuple[Tensor, Tensor]]:
        """The causal EMA for one token x (R, D) after a state, with its current coefficients."""
        coefficients = EMACoefficients(*(t.contiguous() for t in self.coefficients()))  # once, not in each step
        taps = window_taps(coefficients, self.truncation) if self.truncation else None

        def step(x: Tensor, state: Tensor) -> Tuple[Tensor, Tensor]:
            return ema_token(x, coefficients, state, self.omega, taps, silu=True)

        return step

    @property
    def composes(self) -> bool:
        return not self.truncation

    def entering(self, x: Tensor, before: Optional[Tensor], slices: Slices) -> Tuple[Tensor, Tensor]:
        return entering_state(x, self.coefficients(), slices, before)

    def log_decays(self) -> Dict[str, Tensor]:
        """log phi (D, N) by direction, from which half-lives follow."""
        names = ("forward", "backward") if self.bidirectional else ("",)
        return {name: log_decays(a, d) for name, a, d in zip(names, self.alpha, self.delta)}

    def extra_repr(self) -> str:
        return f"{self.dim}, ndim={self.ndim}, bidirectional={self.bidirectional}, truncation={self.truncation}"


def check_truncation(truncation: Optional[int], name: str = "truncation", unlimited: Optional[int] = None) -> None:
    if truncation is not None and (isinstance(truncation, bool) or not isinstance(truncation, int) or truncation < 1):
        raise ValueError(f"{name} is {truncation!r}; give the number of kernel taps to keep, or {unlimited} for all")


# ------------------------------------------------------------------------------------------- mixer


@dataclass(frozen=True)
class GatedAttentionConfig(SingleHeadConfig):
    """Options of moving average equipped gated attention (eq. 6-15)."""

    ndim: int = setting(16, "size of the EMA's state for each channel", "{side}_n_dim")
    truncation: Optional[int] = setting(
        None,
        "how many steps the EMA looks back",
        "{side}_truncation_length",
        fallback="truncation_length",
        unlimited=0,
    )
    attention: str = setting(  # f of eq. 11
        "softmax", "attention function", "attention_activation_fn", choices=ATTENTION_FUNCTIONS
    )
    activation: str = setting(
        "silu", "activation of values and candidate, not of the gates", "activation_fn", choices=ACTIVATIONS
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_positive("ndim")
        check_truncation(self.truncation, self.name("truncation"), 0 if self.side else None)

    def build(self) -> "MovingAverageGatedAttention":
        return MovingAverageGatedAttention(self)


EXAMPLES = {
    "mega": GatedAttentionConfig(4, shared_dim=2, value_dim=6, ndim=3, chunk_size=6, position_bias="rotary"),
    "mega, truncated": GatedAttentionConfig(4, shared_dim=2, value_dim=6, ndim=3, truncation=4, chunk_size=6),
    "mega, unbounded": GatedAttentionConfig(
        4, shared_dim=2, value_dim=6, ndim=3, token_shift=True, attention="laplace"
    ),
}


class GatedAttentionState(NamedTuple):
    """The state of a causal layer: the EMA's, and the keys and values of the unfinished chunk."""

    ema: Tensor  # (B, D, N), or the last inputs (B, D, T - 1) if it is truncated to T taps
    cache: KeyValues  # keys (B, m, z), values (B, m, v); without chunks, of all tokens


class MovingAverageGatedAttention(SingleHeadMixer):
    """Mega's token mixer, including its gates and residual connection."""

    State = GatedAttentionState
    gated_residual = True
    fixed_step = True

    def __init__(self, config: GatedAttentionConfig):
        super().__init__(config)
        c = config
        self.ema = DampedEMA(c.dim, c.ndim, bidirectional=not c.causal, truncation=c.truncation)
        self.values = linear(c.dim, c.value_dim, c.init)
        self.shared = linear(c.dim, c.shared_dim, c.init)
        self.gates = linear(c.dim, c.dim + c.value_dim + c.dim, c.init)  # update, reset, candidate
        self.hidden = linear(c.value_dim, c.dim, c.init)  # U_h
        self.add_attention(scales=2)

    def mix(self, x: Tensor, batch: Batch) -> Tuple[Tensor, Optional[GatedAttentionState]]:
        c, (ema_state, cache) = self.config, batch.state or (None, None)
        values = self.drop(project(self.values, x, c.activation), c.hidden_dropout)  # V (B, L, v), eq. 10

        averaged = self.ema(x, ema_state, batch.align)
        x, ema_state = averaged if c.causal else (averaged, None)
        x = self.drop(x, c.dropout)  # X' (B, L, D), eq. 6
        queries, keys = self.queries_keys(x)  # (B, L, z) each, eq. 7-9
        attended, cache = self.in_chunks(self.attend, queries, keys, values, cache, batch)  # O (B, L, v), eq. 11

        keep, scale = self.keep_mask(x, c.dropout)
        y = gated_residual(x, attended, batch.residual, self.gates, self.hidden, c.activation, keep, scale)  # eq. 12-15
        return y, GatedAttentionState(ema_state, cache) if c.causal else None

    def state_shapes(self) -> Dict[str, Shape]:
        c = self.config
        return {"ema": self.ema.state_shape(), **self.cache_shapes(c.shared_dim, c.value_dim)}

    def step(self) -> MixerStep:
        """Eq. 6-15 for one token, with one projection of X' for Z and all gates."""
        c, position_bias = self.config, TabledBias(self.position_bias)
        average, activation = self.ema.step(), ACTIVATIONS[c.activation].forward
        project_values, project_hidden = packed(self.values), packed(self.hidden)
        project = packed(self.shared, self.gates)
        kappa, mu, widths = self.kappa, self.mu, (c.shared_dim, c.dim, c.value_dim, c.dim)

        def mix(x: Tensor, residual: Tensor, state: GatedAttentionState) -> Tuple[Tensor, GatedAttentionState]:
            values = activation(project_values(x))  # V (R, v), eq. 10
            x, ema_state = average(x, state.ema)  # X' (R, D), eq. 6
            shared, update, reset, candidate = project(x).split(widths, -1)
            queries, keys = queries_keys(shared.unsqueeze(0), kappa, mu)  # (1, R, z) each, eq. 7-9
            args = (values, state.cache, position_bias, c.attention, c.chunk_size)
            attended, cache = attend_token(queries[0], keys[0], *args)  # O (R, v), eq. 11
            y = gate_output(update, reset, candidate, attended, residual, project_hidden, c.activation)  # eq. 12-15
            return y, GatedAttentionState(ema_state, cache)

        return MixerStep(self, mix)

    def log_decays(self) -> Dict[str, Tensor]:
        return self.ema.log_decays()
