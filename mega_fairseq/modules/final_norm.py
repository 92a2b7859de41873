"""A norm after the last layer that carries a state."""

from dataclasses import dataclass
from typing import Dict, Tuple

from torch import Tensor

from mega_fairseq.modules.config import setting
from mega_fairseq.modules.mixer import Batch, Mixer, MixerConfig, MixerStep
from mega_fairseq.modules.mixer_state import Shape
from mega_fairseq.modules.timestep_norm import TimestepNorm
from mega_fairseq.ops.timestep_norm import Statistics


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
