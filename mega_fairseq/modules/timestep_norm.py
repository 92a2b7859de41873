"""Timestep norm (Ma et al. 2024, Megalodon), a norm that carries a state."""

from dataclasses import dataclass
from typing import Callable, Dict, Optional, Tuple

import torch
from torch import Tensor, nn

from mega_fairseq.modules.config import setting
from mega_fairseq.modules.layer import Recurrence
from mega_fairseq.modules.mixer import Batch, Mixer, MixerConfig, MixerStep
from mega_fairseq.modules.mixer_state import Shape
from mega_fairseq.ops.padding import Padding, to_front
from mega_fairseq.ops.sequence_parallel import Slices, entering_statistics
from mega_fairseq.ops.timestep_norm import Statistics, timestep_norm
from mega_fairseq.ops.timestep_norm.naive import no_statistics, norm_step


class TimestepNorm(Recurrence):
    """Group norm with the statistics of all tokens so far: `y, state = norm(x, state, padding_mask)` for (B, L, D).

    The weight is the scale minus 1, so that weight decay pulls the scale to 1.
    """

    def __init__(self, dim: int, groups: int, eps: float = 1e-5, affine: bool = True):
        super().__init__()
        self.groups, self.eps = groups, eps
        self.weight, self.bias = (nn.Parameter(torch.zeros(dim)) if affine else None for _ in range(2))

    def forward(
        self, x: Tensor, state: Optional[Statistics] = None, padding_mask: Optional[Padding] = None
    ) -> Tuple[Tensor, Statistics]:
        x, align, _ = to_front(x, padding_mask)
        lengths = None if align is None else align.lengths
        state = no_statistics(x, self.groups) if state is None else state
        y, state = timestep_norm(x, self.weight, self.bias, state, lengths, self.eps)
        return (y if align is None else align.back(y)), state

    def step(self) -> Callable[[Tensor, Statistics], Tuple[Tensor, Statistics]]:
        """The norm for one token x (R, D) after a state, with its current weights."""
        return lambda x, state: norm_step(x, self.weight, self.bias, state, self.eps)

    def entering(self, x: Tensor, before: Optional[Statistics], slices: Slices) -> Tuple[Statistics, Statistics]:
        before = no_statistics(x, self.groups) if before is None else before
        return entering_statistics(x, self.groups, slices, before)


@dataclass(frozen=True)
class FinalNormConfig(MixerConfig):
    """Options of a timestep norm after the last layer."""

    groups: int = setting(1, "groups of channels with statistics of their own")

    causal_only = True

    def build(self) -> "FinalNorm":
        return FinalNorm(self)


class FinalNorm(Mixer):
    """A timestep norm with the interface of a mixer, so that a decoder carries its state like those of layers."""

    State = Statistics
    norm_in_mix = True
    gated_residual = True
    fixed_step = True

    def __init__(self, config: FinalNormConfig):
        super().__init__(config)
        self.norm = TimestepNorm(config.dim, config.groups, affine=config.norm_affine)

    def mix(self, x: Tensor, batch: Batch) -> Tuple[Tensor, Statistics]:
        return self.norm(x, batch.state, batch.align)

    def state_shapes(self) -> Dict[str, Shape]:
        return {"count": (), "mean": (self.config.groups,), "var": (self.config.groups,)}

    def step(self) -> MixerStep:
        norm = self.norm.step()
        return MixerStep(self, lambda x, residual, state: norm(x, state))
