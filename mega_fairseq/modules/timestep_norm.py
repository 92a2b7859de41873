"""Timestep norm (Ma et al. 2024, Megalodon), a norm that carries a state."""

from typing import Callable, Optional, Tuple

import torch
from torch import Tensor, nn

from mega_fairseq.modules.layer import Recurrence
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
        """The norm for one token x (R, D) after a state, with the weights of now."""
        return lambda x, state: norm_step(x, self.weight, self.bias, state, self.eps)

    def entering(self, x: Tensor, before: Optional[Statistics], slices: Slices) -> Tuple[Statistics, Statistics]:
        before = no_statistics(x, self.groups) if before is None else before
        return entering_statistics(x, self.groups, slices, before)
