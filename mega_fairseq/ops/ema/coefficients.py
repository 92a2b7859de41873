"""The coefficients of the damped EMA, and what follows from them alone: powers of the decay, and tables for blocks."""

import math
from typing import List, NamedTuple, Optional, Union

import torch
from torch import Tensor

from mega_fairseq.ops.block_scan import BlockTables
from mega_fairseq.ops.diagonals import toeplitz_matrix
from mega_fairseq.ops.precision import at_least_float32

# exp(-40) is less than the rounding error of 1, also in float64, and its square is still a float32.
LARGEST_LOGIT = 40.0


class EMACoefficients(NamedTuple):
    """The coefficients of the recurrence, each (R, D, N) in float32 or float64, with R = 1 or 2 directions."""

    log_decay: Tensor  # log phi, finite and <= 0
    expand: Tensor  # alpha . beta: from an input to the state
    project: Tensor  # eta: from the state to an output

    @property
    def bidirectional(self) -> bool:
        return self.expand.size(0) == 2

    def decayed(self, state: Tensor, steps: Union[int, Tensor]) -> Tensor:
        """What is left of a state (..., D, N) after so many steps."""
        return torch.exp(self.log_decay[0] * steps) * state

    def block_tables(self, size: int, skip: Optional[Tensor] = None) -> BlockTables:
        reach = powers(self.log_decay, 0, size)  # (R, D, N, C): phi^t
        entering = self.expand.unsqueeze(-1) * reach  # what is left of an input after t steps
        taps = torch.matmul(self.project.unsqueeze(-2), entering).squeeze(-2)  # (R, D, C)
        present, past = taps[..., 0].sum(0), taps[0, :, 1:]
        if skip is not None:
            present = present + skip
        future = taps[1, :, 1:].flip(-1) if self.bidirectional else torch.zeros_like(past)
        # (D, 2C - 1): the weights of the inputs from C - 1 steps after an output to C - 1 steps before it
        within = toeplitz_matrix(torch.cat([future, present.unsqueeze(-1), past], -1), size, size)
        leaving = (self.project * torch.exp(self.log_decay)).unsqueeze(-1) * reach
        collect, spread = [entering[0].flip(-1), *entering[1:]], [leaving[0], *leaving[1:].flip(-1)]
        decay = torch.exp(self.log_decay * size)
        return BlockTables(within, _joined(collect).transpose(1, 2), _joined(spread), decay)


def _joined(tables: List[Tensor]) -> Tensor:
    return torch.cat(tables, 1) if len(tables) > 1 else tables[0]


def ema_coefficients_naive(alpha: Tensor, delta: Tensor, beta: Tensor, eta: Tensor) -> EMACoefficients:
    """Computes the coefficients from the logits of alpha and delta, and from beta and eta, all (R, D, N).

    R is the number of directions, 1 or 2. eta is scaled by sqrt(1/N).
    """
    alpha, delta, beta, eta = (t.to(at_least_float32(t.dtype)) for t in (alpha, delta, beta, eta))
    return EMACoefficients(log_decays(alpha, delta), torch.sigmoid(alpha) * beta, eta * math.sqrt(1.0 / eta.size(-1)))


def log_decays(alpha: Tensor, delta: Tensor) -> Tensor:
    """log phi from the logits of alpha and delta, in float32 or better.

    With A = exp(-alpha) and B = exp(-delta), phi = S / (1 + S) for S = A + B + A B, a sum of positive terms. Hence
    log phi = -log(1 + 1 / S) keeps its precision for slow decays (phi near 1) and for fast ones, and is finite.
    """
    a, b = (torch.exp(-t.clamp(-LARGEST_LOGIT, LARGEST_LOGIT)) for t in (alpha, delta))
    return -torch.log1p(torch.reciprocal(torch.addcmul(a + b, a, b)))


def powers(log_decay: Tensor, first: int, count: int) -> Tensor:
    """phi^t for t = first .. first + count - 1: (..., N) -> (..., N, count)."""
    t = torch.arange(first, first + count, device=log_decay.device, dtype=log_decay.dtype)
    return torch.exp(log_decay.unsqueeze(-1) * t)
