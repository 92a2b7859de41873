"""The coefficients of the complex EMA, and what follows from them alone: powers of q, and tables for blocks."""

import math
from typing import List, NamedTuple, Optional, Tuple, Union

import torch
from torch import Tensor

from mega_fairseq.ops.block_scan import BlockTables
from mega_fairseq.ops.diagonals import toeplitz_matrix
from mega_fairseq.ops.operators import operator
from mega_fairseq.ops.turns import fraction_of_turn

STEPS = 8  # a power of q is the product of one that is a multiple of so many steps and one of fewer


class CEMACoefficients(NamedTuple):
    """The coefficients of the recurrence for each of D channels and N states, in float32 or float64."""

    log_decay: Tensor  # (D, N) log |q|, finite and <= 0
    turns: Tensor  # (D, N) the angle of q in whole turns, phi / (2 pi), in float64 where the device has it
    expand: Tensor  # (D, N) p: from an input to the state
    project: Tensor  # (D, N, 2) gamma / sqrt(N): from the state to an output, real and imaginary part

    def decayed(self, state: Tensor, steps: Union[int, Tensor]) -> Tensor:
        """What is left of a state (..., D, N, 2) after so many steps."""
        return complex_product(complex_powers(self, steps), state)

    def block_tables(self, size: int, skip: Optional[Tensor] = None) -> BlockTables:
        taps, collect, spread, decay = _tables(*self, size)
        present = taps[:, :1] if skip is None else taps[:, :1] + skip.unsqueeze(-1)
        within = toeplitz_matrix(torch.cat([torch.zeros_like(taps[:, 1:]), present, taps[:, 1:]], -1), size, size)
        return BlockTables(within, collect, spread.transpose(1, 2), decay.unsqueeze(0))


def complex_powers(c: CEMACoefficients, steps: Union[int, Tensor]) -> Tensor:
    """q^steps: steps that broadcast with (D, N) -> (..., D, N, 2), real and imaginary part.

    Angles are rounded once, as fractions of a turn.
    """
    angle = (fraction_of_turn(c.turns, steps) * (2.0 * math.pi)).to(c.expand.dtype)
    direction = torch.stack([torch.cos(angle), torch.sin(angle)], -1)
    return torch.exp(c.log_decay * steps).unsqueeze(-1) * direction


def complex_product(a: Tensor, b: Tensor) -> Tensor:
    """The product of complex numbers in pairs of reals, (..., 2)."""
    (a_real, a_imag), (b_real, b_imag) = a.unbind(-1), b.unbind(-1)
    return torch.stack([a_real * b_real - a_imag * b_imag, a_real * b_imag + a_imag * b_real], -1)


# ------------------------------------------------------------------------------------------- tables for blocks


def _powers(log_decay: Tensor, turns: Tensor, expand: Tensor, project: Tensor, size: int) -> Tensor:
    """q^t for t = 0 .. C, complex: (D, C + 1, N). q^(8a + b) is the product of q^(8a) and q^b: few angles."""
    c, steps = CEMACoefficients(log_decay, turns, expand, project), torch.arange(size + 1, device=turns.device)
    coarse, fine = (
        torch.view_as_complex(complex_powers(c, t.view(-1, 1, 1))).transpose(0, 1).contiguous()
        for t in (steps[::STEPS], steps[:STEPS])
    )
    return (coarse.unsqueeze(2) * fine.unsqueeze(1)).flatten(1, 2)[:, : size + 1]


def _forward(*args) -> Tuple[Tensor, ...]:
    powers, (_, _, expand, project, _) = _powers(*args), args
    entering, gamma = expand.unsqueeze(1) * powers[:, :-1], as_complex(project).unsqueeze(1)
    leaving = torch.conj_physical(gamma * powers[:, 1:])  # for the real part of products with states
    collect, spread = (torch.view_as_real(t).flatten(2) for t in (entering.flip(1), leaving))
    return (entering * gamma).real.sum(-1), collect, spread, torch.view_as_real(powers[:, -1]).clone()


def _fake(log_decay, turns, expand, project, size):
    dim, ndim = expand.shape
    return tuple(expand.new_empty(dim, *shape) for shape in ((size,), (size, 2 * ndim), (size, 2 * ndim), (ndim, 2)))


def _backward(grads, saved, log_decay, turns, expand, project, size) -> List[Tensor]:
    dtaps, dcollect, dspread, ddecay = grads
    # Gradients pass through a product with the conjugate of the other factor. Not `conj`, which is lazy: within a mode
    # such as FlopCounterMode, torch computes as if it was not there.
    powers, gamma = map(torch.conj_physical, (_powers(log_decay, turns, expand, project, size), as_complex(project)))
    weights = torch.arange(size + 1, device=turns.device).to(expand.dtype)
    weights = torch.stack([torch.ones_like(weights), weights])

    def sums(first: int, gradient: Optional[Tensor], last: Optional[int] = None) -> Tuple[Tensor, Tensor]:
        """Sums of g_t conj(q^t) and of t g_t conj(q^t) over t, for the gradient g_t of a multiple of q^t: (D, N)."""
        if gradient is None:
            return (torch.zeros_like(gamma),) * 2
        products = torch.view_as_real(powers[:, first:last] * gradient).flatten(2)
        return torch.view_as_complex(torch.matmul(weights[:, first:last], products).unflatten(2, (-1, 2))).unbind(1)

    taps = sums(0, None if dtaps is None else dtaps.unsqueeze(-1), -1)
    entering = sums(0, None if dcollect is None else as_complex(dcollect.unflatten(2, (-1, 2))).flip(1), -1)
    leaving = sums(1, None if dspread is None else torch.conj_physical(as_complex(dspread.unflatten(2, (-1, 2)))))
    after = sums(size, None if ddecay is None else as_complex(ddecay).unsqueeze(1))
    dlog = expand * (entering[1] + gamma * taps[1]) + gamma * leaving[1] + after[1]
    dexpand, dproject = (entering[0] + gamma * taps[0]).real, leaving[0] + expand * taps[0]
    return [dlog.real, dlog.imag.to(turns.dtype) * (2.0 * math.pi), dexpand, torch.view_as_real(dproject)]


def as_complex(pairs: Tensor) -> Tensor:
    return torch.view_as_complex(pairs.contiguous())


# An operator, since compilers do not support the complex numbers inside, and pairs of reals take four to seven times as
# long. With autograd's own gradient, the tables take twice as long.
_tables = operator(
    "cema_tables(Tensor log_decay, Tensor turns, Tensor expand, Tensor project, int size) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _forward,
    _fake,
    _backward,
    saved=slice(0),
)
