"""The damped EMA by its definition: coefficients, powers of the decay, the kernel, one step, and a loop over steps."""

import math
from typing import NamedTuple, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mega_fairseq.ops.derivatives import once_differentiable
from mega_fairseq.ops.precision import at_least_float32, is_compiling, without_autocast

INNER = 64  # C of the two-level powers: near the square root of common lengths
# exp(-40) is less than the rounding error of 1, also in float64, and its square is still a float32.
LARGEST_LOGIT = 40.0


class EMACoefficients(NamedTuple):
    """The coefficients of the recurrence, each (D, N) in float32 or float64."""

    log_decay: Tensor  # log phi, finite and <= 0
    expand: Tensor  # alpha . beta: from an input to the state
    project: Tensor  # eta: from the state to an output


def ema_coefficients(alpha: Tensor, delta: Tensor, beta: Tensor, eta: Tensor) -> EMACoefficients:
    """Computes the coefficients from the logits of alpha and delta, and from beta and eta, all (..., N).

    eta is scaled by sqrt(1/N).
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
    """phi^t for t = first .. first + count - 1: (D, N) -> (D, N, count)."""
    t = torch.arange(first, first + count, device=log_decay.device, dtype=log_decay.dtype)
    return torch.exp(log_decay.unsqueeze(-1) * t)


def geometric_sum(weight: Tensor, log_decay: Tensor, length: int) -> Tensor:
    """sum_n weight_n phi_n^t for t < length: weight (D, R, N), log_decay (D, N) -> (D, R, length).

    phi^(aC+b) = (phi^C)^a phi^b: two short tables of powers, of length / C + C entries, and one small batched matrix
    product replace a D x N x length tensor and as many exponentials.
    """
    inner = min(length, INNER)
    outer = -(-length // inner)
    coarse = powers(log_decay * inner, 0, outer).transpose(1, 2)  # (D, A, N)
    rows = (weight.unsqueeze(2) * coarse.unsqueeze(1)).flatten(1, 2)  # (D, R A, N)
    taps = torch.bmm(rows, powers(log_decay, 0, inner))  # (D, R A, C)
    return taps.view(weight.size(0), weight.size(1), outer * inner)[..., :length]


def ema_kernel(c: EMACoefficients, length: int) -> Tensor:
    """The first `length` taps of the convolution kernel (eq. 25): (D, length)."""
    return geometric_sum((c.expand * c.project).unsqueeze(1), c.log_decay, length).squeeze(1)


def ema_step(x: Tensor, c: EMACoefficients, state: Tensor) -> Tuple[Tensor, Tensor]:
    """One token: x (B, D), state (B, D, N) -> y (B, D), next state."""
    state = torch.addcmul(c.expand * x.unsqueeze(-1), torch.exp(c.log_decay), state)
    return (state * c.project).sum(-1), state


def ema_naive(x: Tensor, c: EMACoefficients, state: Optional[Tensor] = None) -> Tuple[Tensor, Tensor]:
    """The definition, step by step: x (B, L, D) -> y (B, L, D), final state (B, D, N)."""
    h = zero_state(x, c) if state is None else state
    ys = []
    for t in range(x.size(1)):
        y, h = ema_step(x[:, t], c, h)
        ys.append(y)
    return torch.stack(ys, 1), h


def zero_state(x: Tensor, c: EMACoefficients) -> Tensor:
    return c.expand.new_zeros(x.size(0), *c.expand.shape)


def no_skip(c: EMACoefficients) -> Tensor:
    return c.expand.new_zeros(c.expand.size(0))


def collecting(c: EMACoefficients, steps: int) -> Tensor:
    """The weights from each of `steps` inputs to the state after them: (D, C, N)."""
    return (c.expand.unsqueeze(-1) * powers(c.log_decay, 0, steps)).flip(-1).transpose(1, 2)


def spreading(c: EMACoefficients, steps: int) -> Tensor:
    """The weights from a state to each of the next `steps` outputs: (D, N, C)."""
    return c.project.unsqueeze(-1) * powers(c.log_decay, 1, steps)


def final_state(
    x: Tensor,
    c: EMACoefficients,
    state: Optional[Tensor] = None,
    lengths: Optional[Tensor] = None,
    again: Optional[bool] = None,
) -> Tensor:
    """The state after each row's last token, without computing outputs, by the identity that `geometric_sum` uses.

    With `again`, which is the default on GPUs, only the arguments are kept for backward, which computes it again.
    """
    again = x.device.type != "cpu" if again is None else again
    if again and not is_compiling():
        return _FinalState.apply(lengths, x, state, *c)
    return _final_state(lengths, x, state, *c)


class _FinalState(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *given):
        ctx.save_for_backward(*given)
        return _final_state(*given)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        lengths, *given = ctx.saved_tensors
        with torch.enable_grad(), without_autocast(gradient):
            leaves = [None if t is None else t.detach().requires_grad_() for t in given]
            end = _final_state(lengths, *leaves)
            found = torch.autograd.grad(end, [t for t in leaves if t is not None], gradient, allow_unused=True)
        of_leaves = iter(found)
        return None, *(None if t is None else next(of_leaves) for t in leaves)


def _final_state(lengths: Optional[Tensor], x: Tensor, state: Optional[Tensor], *coefficients: Tensor) -> Tensor:
    c = EMACoefficients(*coefficients)
    x = x.to(c.log_decay.dtype)
    batch, length, dim = x.shape
    inner = min(length, INNER)
    outer = -(-length // inner)
    if lengths is not None:
        x = end_aligned(x, lengths)
    x = F.pad(x, (0, 0, outer * inner - length, 0))  # leading zeros do not change a zero state
    blocks = x.reshape(-1, dim).t().reshape(dim, batch * outer, inner)  # (D, B A, C)
    collect = collecting(c, inner)
    collected = torch.bmm(blocks, collect).view(dim, batch, outer, -1)  # (D, B, A, N)
    reach = powers(c.log_decay * inner, 0, outer).flip(-1).transpose(1, 2)  # (D, A, N)
    end = (collected * reach.unsqueeze(1)).sum(2).transpose(0, 1)  # (B, D, N)
    if state is None:
        return end
    steps = length if lengths is None else lengths.to(x.dtype).view(-1, 1, 1)
    return torch.addcmul(end, torch.exp(c.log_decay * steps), state)


def end_aligned(x: Tensor, lengths: Tensor) -> Tensor:
    """Rolls each row so that its first `lengths` entries come last: (B, L, ...) -> (B, L, ...)."""
    length = x.size(1)
    at = torch.arange(length, device=x.device) + lengths.unsqueeze(1)  # (B, L)
    return x.gather(1, (at % length).view(*at.shape, *[1] * (x.dim() - 2)).expand_as(x))
