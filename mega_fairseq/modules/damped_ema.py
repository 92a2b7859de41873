"""The EMA sub-layer: silu(EMA(x) + omega x) (paper eq. 3-5; omega and silu are from the released code)."""

from typing import List, Optional, Tuple, Union

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mega_fairseq.modules.checks import (
    check_padding_mask,
    check_sequence,
    check_state_shape,
    check_state_type,
)
from mega_fairseq.modules.config import check_positive
from mega_fairseq.ops.backend import kernels_run
from mega_fairseq.ops.ema import EMACoefficients, bidirectional_ema, ema, ema_coefficients, ema_of_slice
from mega_fairseq.ops.padding import Padding, to_front
from mega_fairseq.ops.precision import at_least_float32
from mega_fairseq.ops.sequence_parallel import Slices

STATES_IN_REGISTERS = 16  # of a channel, for the Triton kernels, which hold them in one thread


class DampedEMA(nn.Module):
    """Multi-dimensional damped EMA, one per channel, for sequences (B, L, D).

    Causal: `y, state = module(x, state, padding_mask)`. Bidirectional: `y = module(x, padding_mask=...)`.
    """

    def __init__(self, dim: int, ndim: int = 16, bidirectional: bool = False, truncation: Optional[int] = None):
        super().__init__()
        check_positive(dim=dim, ndim=ndim)
        check_truncation(truncation)
        self.dim, self.ndim, self.bidirectional, self.truncation = (
            dim,
            ndim,
            bidirectional,
            truncation or None,
        )
        directions = 2 if bidirectional else 1
        # Logits of alpha (input weight) and delta (damping); the released code has these two names swapped.
        self.alpha = nn.Parameter(torch.empty(directions, dim, ndim))
        self.delta = nn.Parameter(torch.empty(directions, dim, ndim))
        self.beta = nn.Parameter(torch.empty(directions, dim, ndim))
        self.eta = nn.Parameter(torch.empty(directions, dim, ndim))
        self.omega = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.alpha, std=0.2)
        nn.init.normal_(self.delta, std=0.2)
        nn.init.normal_(self.beta, std=0.02)
        with torch.no_grad():  # +1, -1, +1, ...: alternating signs in the hidden state
            self.beta[..., 0::2] += 1.0
            self.beta[..., 1::2] -= 1.0
        nn.init.normal_(self.eta)
        nn.init.normal_(self.omega)

    def coefficients(self) -> List[EMACoefficients]:
        """Those of the forward direction and, if bidirectional, of the backward one."""
        both = ema_coefficients(self.alpha, self.delta, self.beta, self.eta)
        return [EMACoefficients(*of_direction) for of_direction in zip(*(t.unbind() for t in both))]

    def forward(
        self, x: Tensor, state: Optional[Tensor] = None, padding_mask: Optional[Padding] = None
    ) -> Union[Tensor, Tuple[Tensor, Tensor]]:
        check_sequence("x", x, self.dim, self.omega)
        check_state_type(state, Tensor)
        check_padding_mask(padding_mask, x)
        x, align, _ = to_front(x, padding_mask)
        out = self.aligned(x, state, None if align is None else align.lengths)
        if align is None:
            return out
        return align.back(out) if self.bidirectional else (align.back(out[0]), out[1])

    def aligned(
        self,
        x: Tensor,
        state: Optional[Tensor] = None,
        lengths: Optional[Tensor] = None,
        slices: Optional[Slices] = None,
    ) -> Union[Tensor, Tuple[Tensor, Tensor]]:
        """`forward` for a batch that is padded on the right only, with rows of these `lengths`, or for its `slices`."""
        omega = self.omega.to(at_least_float32(self.omega.dtype))
        if self.bidirectional and state is not None:
            raise ValueError("a bidirectional EMA has no state; build it with bidirectional=False to stream")
        self.check_state(state, x)
        if slices is None and self.truncation is None and self.ndim <= STATES_IN_REGISTERS and kernels_run(x):
            from mega_fairseq.ops.ema.triton import triton_ema  # here, since Triton may be missing

            y, state = triton_ema(x, (self.alpha, self.delta, self.beta, self.eta), state, omega, lengths)
            return F.silu(y) if self.bidirectional else (F.silu(y), state)
        if self.bidirectional:
            return F.silu(bidirectional_ema(x, *self.coefficients(), omega, self.truncation, lengths))
        (coefficients,) = self.coefficients()
        if slices is not None:
            y, state = ema_of_slice(x, coefficients, slices, state, omega, self.truncation)
        else:
            y, state = ema(x, coefficients, state, omega, self.truncation, lengths)
        return F.silu(y), state

    def check_state(self, state: Optional[Tensor], x: Tensor) -> None:
        if state is not None:
            check_state_shape("the EMA state", state, (x.size(0), *self.state_shape()))

    def state_shape(self) -> Tuple[int, int]:
        """The shape for one row: (D, N), or (D, T - 1) for the inputs that T taps still reach."""
        return self.dim, self.truncation - 1 if self.truncation else self.ndim

    def extra_repr(self) -> str:
        return f"{self.dim}, ndim={self.ndim}, bidirectional={self.bidirectional}, truncation={self.truncation}"


def check_truncation(truncation: Optional[int], name: str = "truncation") -> None:
    if truncation is not None and (isinstance(truncation, bool) or not isinstance(truncation, int) or truncation < 0):
        raise ValueError(f"{name} is {truncation!r}; give the number of kernel taps to keep, or 0 for all")
