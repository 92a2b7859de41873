"""The complex EMA in blocks of C steps (`ops/block_scan`): its tables, and a step, in complex numbers.

Compilers do not support these, and pairs of reals take four to seven times as long: each is one operator.
"""

import math
from functools import partial
from typing import List, Optional, Tuple, Union

import torch
from torch import Tensor

from mega_fairseq.ops.block_scan import BlockTables, in_blocks, state_after
from mega_fairseq.ops.cema.naive import CEMACoefficients, complex_powers, decayed
from mega_fairseq.ops.diagonals import toeplitz_matrix
from mega_fairseq.ops.operators import operator, without_gradient
from mega_fairseq.ops.padding import zeros_at_pads

STEPS = 8  # a power of q is the product of one that is a multiple of so many steps and one of fewer


def cema_blocks(
    x: Tensor,
    c: CEMACoefficients,
    state: Optional[Tensor] = None,
    skip: Optional[Tensor] = None,
    lengths: Optional[Tensor] = None,
) -> Tuple[Tensor, Tensor]:
    """`cema` in blocks."""
    state = None if state is None else state.flatten(2)
    y, end = in_blocks(zeros_at_pads(x, lengths), state, partial(_block_tables, c, skip), partial(_carry, c), lengths)
    return zeros_at_pads(y, lengths).to(x.dtype), end.unflatten(2, (-1, 2))


def final_state(x: Tensor, c: CEMACoefficients) -> Tensor:
    """The state after x (B, L, D), from a state of zeros and without its outputs: (B, D, N, 2)."""
    return state_after(x, partial(_block_tables, c, None), partial(_carry, c)).unflatten(2, (-1, 2))


def _carry(c: CEMACoefficients, state: Tensor, steps: Union[int, Tensor]) -> Tensor:
    """What is left of a state (..., D, 2 N) after so many steps."""
    return decayed(c, state.unflatten(-1, (-1, 2)), steps).flatten(-2)


def _block_tables(c: CEMACoefficients, skip: Optional[Tensor], size: int) -> BlockTables:
    taps, collect, spread, decay = _tables(*c, size)
    present = taps[:, :1] if skip is None else taps[:, :1] + skip.unsqueeze(-1)
    within = toeplitz_matrix(torch.cat([torch.zeros_like(taps[:, 1:]), present, taps[:, 1:]], -1), size, size)
    return BlockTables(within, collect, spread.transpose(1, 2), decay.unsqueeze(0))


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
    entering, gamma = expand.unsqueeze(1) * powers[:, :-1], _complex(project).unsqueeze(1)
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
    powers, gamma = map(torch.conj_physical, (_powers(log_decay, turns, expand, project, size), _complex(project)))
    weights = torch.arange(size + 1, device=turns.device).to(expand.dtype)
    weights = torch.stack([torch.ones_like(weights), weights])

    def sums(first: int, gradient: Optional[Tensor], last: Optional[int] = None) -> Tuple[Tensor, Tensor]:
        """Sums of g_t conj(q^t) and of t g_t conj(q^t) over t, for the gradient g_t of a multiple of q^t: (D, N)."""
        if gradient is None:
            return (torch.zeros_like(gamma),) * 2
        products = torch.view_as_real(powers[:, first:last] * gradient).flatten(2)
        return torch.view_as_complex(torch.matmul(weights[:, first:last], products).unflatten(2, (-1, 2))).unbind(1)

    taps = sums(0, None if dtaps is None else dtaps.unsqueeze(-1), -1)
    entering = sums(0, None if dcollect is None else _complex(dcollect.unflatten(2, (-1, 2))).flip(1), -1)
    leaving = sums(1, None if dspread is None else torch.conj_physical(_complex(dspread.unflatten(2, (-1, 2)))))
    after = sums(size, None if ddecay is None else _complex(ddecay).unsqueeze(1))
    dlog = expand * (entering[1] + gamma * taps[1]) + gamma * leaving[1] + after[1]
    dexpand, dproject = (entering[0] + gamma * taps[0]).real, leaving[0] + expand * taps[0]
    return [dlog.real, dlog.imag.to(turns.dtype) * (2.0 * math.pi), dexpand, torch.view_as_real(dproject)]


def _complex(pairs: Tensor) -> Tensor:
    return torch.view_as_complex(pairs.contiguous())


# With autograd's own gradient, these take twice as long.
_tables = operator(
    "cema_tables(Tensor log_decay, Tensor turns, Tensor expand, Tensor project, int size) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _forward,
    _fake,
    _backward,
    saved=slice(0),
)


# ---------------------------------------------------------------------------------------------- single tokens


def _step(x: Tensor, expand: Tensor, project: Tensor, decay: Tensor, state: Tensor) -> Tuple[Tensor, Tensor]:
    q = _complex(decay)
    after = torch.addcmul((expand * x.unsqueeze(-1)).to(q.dtype), q, _complex(state.to(expand.dtype)))
    after, weights = (torch.view_as_real(t) for t in (after, torch.conj_physical(_complex(project))))
    return (weights * after).flatten(-2).sum(-1), after  # the real part of the product with `project`


def _fake_step(x, expand, project, decay, state) -> Tuple[Tensor, Tensor]:
    return torch.empty_like(x), expand.new_empty(state.shape)


# `cema_step` without gradients.
complex_step = without_gradient(
    "cema_step(Tensor x, Tensor expand, Tensor project, Tensor decay, Tensor state) -> (Tensor, Tensor)",
    _step,
    _fake_step,
)
