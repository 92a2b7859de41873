"""The damped EMA by Triton kernels, on NVIDIA GPUs.

Rows are cut into segments of T steps, which are computed in parallel, by three kernels:

    segment_sums    what the steps of each segment add to the state after it
    scan_segments   from these, the state before each segment and the state after all of them
    outputs         from the state before a segment, its outputs

The gradient of x is the EMA of dy in the opposite direction, with `expand` and `project` exchanged: the same kernels.
In `coefficient_gradients`, each program sums up gradients of the coefficients, and `add_gradients` adds these sums. The
complex EMA (`ops/cema`) has the same kernels.
"""

import math
from typing import Any, List, NamedTuple, Optional, Sequence, Tuple

import torch
import triton
from torch import Tensor

from mega_fairseq.ops.backend import launch
from mega_fairseq.ops.ema import coefficient_kernels, kernels
from mega_fairseq.ops.ema.coefficients import LARGEST_LOGIT, EMACoefficients
from mega_fairseq.ops.operators import operator, without_gradient
from mega_fairseq.ops.precision import at_least_float32

CHANNELS = 32  # of a program: one warp
SEGMENT = 256  # steps of a segment, whatever the batch is, so that rows do not depend on it
TOKEN_CHANNELS = 64  # of a program for single tokens
MANY_ROWS = 256  # from which on a program has several, since programs would read more coefficients than states
STATES_WITH_GRADIENTS = 16  # real numbers that a thread can hold together with their derivatives
PROGRAMS = 128  # at most, which sum up gradients of coefficients


def ema_triton(
    x: Tensor,
    c: EMACoefficients,
    state: Optional[Tensor] = None,
    skip: Optional[Tensor] = None,
    lengths: Optional[Tensor] = None,
) -> Tuple[Tensor, Optional[Tensor]]:
    """`ema` by Triton kernels, without truncation. Tables and states are (..., N, D) inside."""
    tables = [t.transpose(1, 2).contiguous() for t in c]
    state = None if state is None else state.to(tables[0].dtype).transpose(1, 2).contiguous()
    skip = tables[0].new_zeros(x.size(2)) if skip is None else skip.contiguous()
    lengths = None if lengths is None else lengths.contiguous()
    y, end, _ = recurrence(x.contiguous(), lengths, state, skip, *tables, None, None)
    return y, end.transpose(1, 2) if len(tables[0]) == 1 else None


def ema_coefficients_triton(alpha: Tensor, delta: Tensor, beta: Tensor, eta: Tensor) -> EMACoefficients:
    """`ema_coefficients` by one kernel."""
    tables = _coefficients(*(t.contiguous() for t in (alpha, delta, beta, eta)))
    return EMACoefficients(*(t.transpose(1, 2) for t in tables))


def _launch(kernel: Any, programs: int, dim: int, ndim: int, *args: Any, groups: int = 1, **options: Any) -> None:
    states = ndim // groups
    sizes = {"N": states, "PADDED": triton.next_power_of_2(states), "C": CHANNELS}
    launch(kernel, (programs, triton.cdiv(dim, CHANNELS), groups), *args, **sizes, **options, num_warps=1)


# ---------------------------------------------------------------------------------------------- the recurrence


def _segments(x: Tensor) -> Tuple[int, int]:
    """Into how many segments rows are cut, and their number of steps."""
    steps = min(x.size(1), SEGMENT)
    return triton.cdiv(x.size(1), steps), steps


def _run(kernel: Any, programs: int, x: Tensor, ndim: int, *args: Any, **options: int) -> None:
    (_, length, dim), (count, steps) = x.shape, _segments(x)
    _launch(kernel, programs, dim, ndim, *args, length, steps, dim, count, **options)


class Tables(NamedTuple):
    """One direction, (N, D) each; `turns` and `weight_imag` only if states are complex, as `kernels.py` says."""

    log_decay: Tensor
    expand: Tensor
    project: Tensor
    turns: Optional[Tensor] = None
    weight_imag: Optional[Tensor] = None

    @classmethod
    def of(cls, direction: int, *tables: Optional[Tensor]) -> "Tables":
        return cls(*(None if t is None else t[direction] for t in tables))

    @property
    def complex(self) -> bool:
        return self.turns is not None

    def new_states(self, *shape: int) -> Tensor:
        """(..., N, D), or (..., 2 N, D) if they are complex."""
        ndim, dim = self.expand.shape
        return self.expand.new_empty(*shape, ndim * (1 + self.complex), dim)

    def conjugate(self, states: Optional[Tensor]) -> Optional[Tensor]:
        """The conjugates of states (..., 2 N, D) if they are complex."""
        if not self.complex or states is None:
            return states
        real, imag = states.chunk(2, -2)
        return torch.cat([real, -imag], -2)


def _pass(x, lengths, tables: Tables, skip, start, add, dtype, **direction) -> Tuple[Tensor, Tensor, Optional[Tensor]]:
    """One direction, `add` added to its outputs.

    Returns y in `dtype`, the state after all steps (B, N, D), and the states before segments (B, K, N, D).
    """
    batch, (count, _), ndim, decay = x.size(0), _segments(x), len(tables.expand), (tables.log_decay, tables.turns)
    y, end, before = torch.empty_like(x, dtype=dtype), tables.new_states(batch), start
    kind = {"COMPLEX": tables.complex, **direction}
    if count > 1:
        before, sums = (tables.new_states(batch, count) for _ in range(2))
        args = (x, lengths, *decay, tables.expand, tables.weight_imag, sums)
        _run(kernels.segment_sums, batch * count, x, ndim, *args, **kind)
        args = (sums, lengths, *decay, start, before, end)
        _run(kernels.scan_segments, batch, x, ndim, *args, COMPLEX=tables.complex, BACK=direction["BACK"])
    args = (x, lengths, *decay, tables.expand, tables.project, tables.weight_imag, skip, before, add, y)
    _run(kernels.outputs, batch * count, x, ndim, *args, end if count == 1 else None, **kind)
    return y, end, before


def _forward(x, lengths, start, skip, *tables: Optional[Tensor]) -> Tuple[Tensor, Tensor, Tensor]:
    y, entering = None, []
    for direction in reversed(range(len(tables[0]))):
        # The backward direction's outputs are in float32, since they are rounded with those of the forward direction.
        args = (None, None, None, tables[0].dtype) if direction else (skip, start, y, x.dtype)
        y, end, before = _pass(x, lengths, Tables.of(direction, *tables), *args, BACK=bool(direction), GRADIENT=False)
        entering.insert(0, before)
    return y, end, _stack(entering) if _segments(x)[0] > 1 else tables[0].new_empty(0)


def _backward(grads, saved, x, lengths, start, skip, *tables: Optional[Tensor]) -> List[Tensor]:
    dy, dend, _ = (None if t is None else t.contiguous() for t in grads)
    dy = torch.zeros_like(x) if dy is None else dy
    dx, dtables, (_, entering) = None, [], saved
    for direction in reversed(range(len(tables[0]))):
        own = Tables.of(direction, *tables)
        args = (None, None, None, tables[0].dtype) if direction else (skip, own.conjugate(dend), dx, x.dtype)
        exchanged = own._replace(expand=own.project, project=own.expand)
        dx, dstart, after = _pass(dy, lengths, exchanged, *args, BACK=not direction, GRADIENT=True)
        before = entering[direction] if _segments(x)[0] > 1 else None if direction else start
        gradients, dskip = _coefficient_gradients(x, dy, lengths, own, before, after, skip, BACK=bool(direction))
        dtables.insert(0, gradients)
    return [dx, *([] if start is None else [own.conjugate(dstart)]), dskip, *map(_stack, zip(*dtables))]


def _stack(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack(tensors) if len(tensors) > 1 else tensors[0].unsqueeze(0)  # not a copy


def _coefficient_gradients(x, dy, lengths, tables: Tables, before, after, skip, BACK) -> Tuple[List[Tensor], Tensor]:
    """The gradients of `tables` (N, D), and of `skip`."""
    total, (ndim, dim) = x.size(0) * _segments(x)[0], tables.expand.shape
    width = ndim * (1 + tables.complex)
    sums = tables.expand.new_empty(min(total, PROGRAMS), 3 * width + 1, dim)
    log_decay, expand, project, turns, weight_imag = tables
    args = (x, dy, lengths, log_decay, turns, expand, project, weight_imag, before, after, sums, total)
    groups = next(n for n in range(1, ndim + 1) if ndim % n == 0 and width // n <= STATES_WITH_GRADIENTS)
    _run(kernels.coefficient_gradients, len(sums), x, ndim, *args, groups=groups, COMPLEX=tables.complex, BACK=BACK)
    of_log_decay, of_expand, of_project = (tables.new_states() for _ in range(3))
    dskip, grid = torch.empty_like(skip), (sums.size(1), triton.cdiv(dim, CHANNELS))
    args = (sums, of_log_decay, of_expand, of_project, dskip, len(sums), width, dim)
    launch(coefficient_kernels.add_gradients, grid, *args, ROWS=32, C=CHANNELS)
    gradients = [of_log_decay[:ndim], of_expand[:ndim], of_project[:ndim]]
    if tables.complex:  # y is the real part of complex functions with these derivatives
        gradients += [-2.0 * math.pi * of_log_decay[ndim:].to(turns.dtype), -of_project[ndim:]]
    return gradients, dskip


def _fake(x, lengths, start, skip, log_decay, expand, project, turns, weight_imag):
    directions, ndim, dim = log_decay.shape
    shape, (count, _) = (ndim if turns is None else 2 * ndim, dim), _segments(x)
    entering = expand.new_empty(directions, x.size(0), count, *shape) if count > 1 else expand.new_empty(0)
    return torch.empty_like(x), expand.new_empty(x.size(0), *shape), entering


# y, the state of the first direction after it (B, N, D), and the states before several segments (R, B, K, N, D).
recurrence = operator(
    "ema_triton(Tensor x, Tensor? lengths, Tensor? start, Tensor skip, Tensor log_decay, Tensor expand, "
    "Tensor project, Tensor? turns, Tensor? weight_imag) -> (Tensor, Tensor, Tensor)",
    _forward,
    _fake,
    _backward,
)


# ---------------------------------------------------------------------------------------------- single tokens


def _token_fake(x, log_decay, expand, project, state, skip, silu, turns) -> Tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), expand.new_empty(state.shape)


def _token(x, log_decay, expand, project, state, skip, silu, turns) -> Tuple[Tensor, Tensor]:
    y, after = _token_fake(x, log_decay, expand, project, state, skip, silu, turns)
    rows, dim, ndim = state.shape[:3]
    tensors = (x, state.to(after.dtype), log_decay, turns, expand, project, skip)
    tensors = (None if t is None else t.contiguous() for t in tensors)
    together = 4 if rows >= MANY_ROWS else 1
    sizes = {"N": ndim, "PADDED": triton.next_power_of_2(ndim), "C": TOKEN_CHANNELS, "ROWS": together, "SILU": silu}
    sizes["COMPLEX"] = turns is not None
    grid = (triton.cdiv(rows, together), triton.cdiv(dim, TOKEN_CHANNELS))
    launch(kernels.token, grid, *tensors, y, after, rows, dim, **sizes)
    return y, after


# x (R, D), coefficients (1, D, N), state (R, D, N) -> y or silu(y) (R, D), the next state. With `turns`, `project` and
# states are complex, (..., 2).
token = without_gradient(
    "ema_token(Tensor x, Tensor log_decay, Tensor expand, Tensor project, Tensor state, Tensor? skip, bool silu, "
    "Tensor? turns) -> (Tensor, Tensor)",
    _token,
    _token_fake,
)


def ema_token(
    x: Tensor,
    c: EMACoefficients,
    state: Tensor,
    skip: Optional[Tensor] = None,
    taps: None = None,
    silu: bool = False,
) -> Tuple[Tensor, Tensor]:
    return token(x, *c, state, skip, silu, None)


# ---------------------------------------------------------------------------------------------- coefficients


def _coefficients_forward(alpha, delta, beta, eta) -> Tuple[Tensor, ...]:
    tables = _coefficients_fake(alpha, delta, beta, eta)
    _run_coefficients(coefficient_kernels.coefficients, alpha, delta, beta, eta, *tables)
    return tables


def _coefficients_fake(alpha, delta, beta, eta) -> Tuple[Tensor, ...]:
    directions, dim, ndim = alpha.shape
    dtype = at_least_float32(alpha.dtype)
    return tuple(alpha.new_empty(directions, ndim, dim, dtype=dtype) for _ in range(3))


def _coefficients_backward(grads, saved, *logits: Tensor) -> List[Tensor]:
    grads = [torch.zeros_like(saved[0]) if t is None else t.contiguous() for t in grads]
    dlogits = [t.new_empty(t.shape) for t in logits]
    _run_coefficients(coefficient_kernels.coefficients_backward, *logits[:3], *grads, *dlogits)
    return dlogits


def _run_coefficients(kernel: Any, alpha: Tensor, *args: Tensor) -> None:
    directions, dim, ndim = alpha.shape
    _launch(kernel, directions, dim, ndim, alpha, *args, dim, SCALE=math.sqrt(1.0 / ndim), LARGEST=LARGEST_LOGIT)


# log_decay, expand and project (R, N, D), in float32 or better, by one kernel and one for the gradients.
_coefficients = operator(
    "ema_coefficients(Tensor alpha, Tensor delta, Tensor beta, Tensor eta) -> (Tensor, Tensor, Tensor)",
    _coefficients_forward,
    _coefficients_fake,
    _coefficients_backward,
)
