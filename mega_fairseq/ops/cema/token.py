"""The complex EMA of a single token."""

from typing import Optional, Tuple

import torch
from torch import Tensor

from mega_fairseq.ops.backend import Forms, without_gradients
from mega_fairseq.ops.cema.coefficients import CEMACoefficients, as_complex, complex_powers
from mega_fairseq.ops.cema.naive import cema_step
from mega_fairseq.ops.operators import without_gradient


def _step(x: Tensor, expand: Tensor, project: Tensor, decay: Tensor, state: Tensor) -> Tuple[Tensor, Tensor]:
    q = as_complex(decay)
    after = torch.addcmul((expand * x.unsqueeze(-1)).to(q.dtype), q, as_complex(state.to(expand.dtype)))
    after, weights = (torch.view_as_real(t) for t in (after, torch.conj_physical(as_complex(project))))
    return (weights * after).flatten(-2).sum(-1), after  # the real part of the product with `project`


def _fake_step(x, expand, project, decay, state) -> Tuple[Tensor, Tensor]:
    return torch.empty_like(x), expand.new_empty(state.shape)


# `cema_step` without gradients, in complex numbers, which are several times as fast as pairs of reals.
_complex_step = without_gradient(
    "cema_step(Tensor x, Tensor expand, Tensor project, Tensor decay, Tensor state) -> (Tensor, Tensor)",
    _step,
    _fake_step,
)


def cema_token_naive(
    x: Tensor, c: CEMACoefficients, state: Tensor, skip: Optional[Tensor] = None, decay: Optional[Tensor] = None
) -> Tuple[Tensor, Tensor]:
    """One token, for decoding: x (B, D), state (B, D, N, 2) -> y (B, D) in x's dtype, next state.

    `decay` is q (D, N, 2), `complex_powers(c, 1)`, computed once per generation.
    """
    wide, decay = x.to(c.expand.dtype), complex_powers(c, 1) if decay is None else decay
    if torch.is_grad_enabled():
        y, state = cema_step(wide, c, decay, state)
    else:
        y, state = _complex_step(wide, c.expand, c.project, decay, state)
    return (y if skip is None else torch.addcmul(y, skip, wide)).to(x.dtype), state


cema_token = Forms(cema_token_naive, triton="mega_fairseq.ops.cema.triton:cema_token", suits=without_gradients)
