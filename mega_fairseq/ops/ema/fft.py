"""The damped EMA by the convolution theorem, with a kernel built in two levels of powers."""

from typing import Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mega_fairseq.ops.derivatives import once_differentiable
from mega_fairseq.ops.ema.naive import EMACoefficients, ema_kernel, final_state, geometric_sum
from mega_fairseq.ops.precision import is_compiling


def _fft_length(n: int) -> int:
    """The smallest 2^a 3^b 5^c >= n, a length for which the FFT is fast."""
    best = _doubled(1, n)
    five = 1
    while five < best:
        three = five
        while three < best:
            best = min(best, _doubled(three, n))
            three *= 3
        five *= 5
    return best


def _doubled(start: int, n: int) -> int:
    while start < n:
        start *= 2
    return start


def _spectrum(x: Tensor, n: int) -> Tensor:
    """(B, L, D) -> (B, D, n // 2 + 1), complex."""
    return torch.fft.rfft(x.transpose(1, 2), n)


def _product(spectrum: Tensor, kernel: Tensor, n: int, length: int) -> Tensor:
    """The first `length` outputs (B, L, D) of a product of spectra."""
    return torch.fft.irfft(spectrum * kernel, n)[..., :length].transpose(1, 2).contiguous()  # not a view of all n


class _Convolve(torch.autograd.Function):
    """x (B, L, D) and a kernel (D, n), circularly. Spectra are larger than x, so backward computes them again."""

    @staticmethod
    def forward(ctx, x, kernel):
        ctx.save_for_backward(x, kernel)
        n = kernel.size(-1)
        return _product(_spectrum(x, n), torch.fft.rfft(kernel), n, x.size(1))

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, kernel = ctx.saved_tensors
        n = kernel.size(-1)
        gradient = _spectrum(dy, n)
        dx = _product(gradient, torch.fft.rfft(kernel).conj(), n, x.size(1))
        return dx, torch.fft.irfft((gradient * _spectrum(x, n).conj()).sum(0), n)


def _convolve(x: Tensor, taps: Tensor, past: int, future: int) -> Tensor:
    """x (B, L, D) with taps (D, past + 1 + future) for lags -future .. past -> (B, L, D), by FFT."""
    n = _fft_length(x.size(1) + max(past, future))
    kernel = F.pad(taps, (0, n - taps.size(-1))).roll(-future, -1)
    if is_compiling():
        return _product(_spectrum(x, n), torch.fft.rfft(kernel), n, x.size(1))
    return _Convolve.apply(x, kernel)


def ema_fft(
    x: Tensor, c: EMACoefficients, state: Optional[Tensor] = None, skip: Optional[Tensor] = None
) -> Tuple[Tensor, Tensor]:
    """Causal EMA by the convolution theorem: x (B, L, D) -> y (B, L, D), final state (B, D, N)."""
    length = x.size(1)
    y = _convolve(x, ema_kernel(c, length), length - 1, 0)
    if skip is not None:
        y = y + skip * x
    if state is not None:
        first = state.transpose(0, 1) * (c.project * torch.exp(c.log_decay)).unsqueeze(1)  # (D, B, N)
        y = y + geometric_sum(first, c.log_decay, length).permute(1, 2, 0)
    return y, final_state(x, c, state)


def ema_fft_both(
    x: Tensor, c: EMACoefficients, backward: EMACoefficients, skip: Tensor, truncation: Optional[int]
) -> Tensor:
    taps = x.size(1) if truncation is None else min(truncation, x.size(1))
    ahead, back = ema_kernel(c, taps), ema_kernel(backward, taps)
    present = ahead[:, :1] + back[:, :1] + skip.unsqueeze(-1)
    return _convolve(x, torch.cat([back[:, 1:].flip(-1), present, ahead[:, 1:]], -1), taps - 1, taps - 1)
