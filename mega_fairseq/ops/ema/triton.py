"""The damped EMA by Triton kernels, on NVIDIA GPUs.

Rows are cut into segments of T steps, which are computed in parallel, by three kernels:

    segment_sums    what the steps of each segment add to the state after it
    scan_segments   from these, the state before each segment and the state after all of them
    outputs         from the state before a segment, its outputs

The gradient of x is the EMA of dy in the opposite direction, with `expand` and `project` exchanged: the same kernels.
`coefficient_gradients` then computes those of the coefficients.
"""

import math
from typing import Any, List, Optional, Sequence, Tuple

import torch
import triton
from torch import Tensor

from mega_fairseq.ops.backend import launch
from mega_fairseq.ops.ema import kernels
from mega_fairseq.ops.ema.naive import LARGEST_LOGIT, EMACoefficients
from mega_fairseq.ops.operators import operator, without_gradient
from mega_fairseq.ops.precision import at_least_float32

CHANNELS = 32  # of a program: one warp
SEGMENT = 256  # steps of a segment, whatever the batch is, so that rows do not depend on it
TOKEN_CHANNELS = 64  # of a program for single tokens
MANY_ROWS = 256  # from which on a program has several, since programs would read more coefficients than states
PARTS = 128  # of the gradients of coefficients, which are added at the end


def ema_triton(
    x: Tensor,
    c: EMACoefficients,
    state: Optional[Tensor] = None,
    skip: Optional[Tensor] = None,
    truncation: None = None,
    lengths: Optional[Tensor] = None,
) -> Tuple[Tensor, Optional[Tensor]]:
    """`ema` by Triton kernels, without truncation. Tables and states are (..., N, D) inside."""
    tables = [t.transpose(1, 2).contiguous() for t in c]
    state = None if state is None else state.to(tables[0].dtype).transpose(1, 2).contiguous()
    skip = tables[0].new_zeros(x.size(2)) if skip is None else skip.to(tables[0].dtype).contiguous()
    lengths = None if lengths is None else lengths.contiguous()
    y, end, _ = _ema(x.contiguous(), lengths, state, skip, *tables)
    return y, end.transpose(1, 2) if len(tables[0]) == 1 else None


def ema_coefficients_triton(alpha: Tensor, delta: Tensor, beta: Tensor, eta: Tensor) -> EMACoefficients:
    """`ema_coefficients` by one kernel."""
    tables = _coefficients(*(t.contiguous() for t in (alpha, delta, beta, eta)))
    return EMACoefficients(*(t.transpose(1, 2) for t in tables))


def _launch(kernel: Any, programs: int, dim: int, ndim: int, *args: Any, **options: Any) -> None:
    sizes = {"N": ndim, "PADDED": triton.next_power_of_2(ndim), "C": CHANNELS}
    launch(kernel, (programs, triton.cdiv(dim, CHANNELS)), *args, **sizes, **options, num_warps=1)


# ---------------------------------------------------------------------------------------------- the recurrence


def _segments(x: Tensor) -> Tuple[int, int]:
    """Into how many segments rows are cut, and their number of steps."""
    steps = min(x.size(1), SEGMENT)
    return triton.cdiv(x.size(1), steps), steps


def _run(kernel: Any, programs: int, x: Tensor, ndim: int, *args: Any, **options: bool) -> None:
    (_, length, dim), (count, steps) = x.shape, _segments(x)
    _launch(kernel, programs, dim, ndim, *args, length, steps, dim, count, **options)


def _pass(
    x: Tensor,
    lengths: Optional[Tensor],
    tables: Sequence[Tensor],
    skip: Optional[Tensor],
    start: Optional[Tensor],
    add: Optional[Tensor],
    dtype: torch.dtype,
    **direction: bool,
) -> Tuple[Tensor, Tensor, Optional[Tensor]]:
    """One direction of log_decay, expand and project, (N, D) each, `add` added to its outputs.

    Returns y in `dtype`, the state after all steps (B, N, D), and the states before segments (B, K, N, D).
    """
    batch, (count, _), (ndim, dim) = x.size(0), _segments(x), tables[0].shape
    y, end, before = torch.empty_like(x, dtype=dtype), tables[0].new_empty(batch, ndim, dim), start
    if count > 1:
        before, sums = (tables[0].new_empty(batch, count, ndim, dim) for _ in range(2))
        _run(kernels.segment_sums, batch * count, x, ndim, x, lengths, *tables[:2], sums, **direction)
        args = (sums, lengths, tables[0], start, before, end)
        _run(kernels.scan_segments, batch, x, ndim, *args, BACK=direction["BACK"])
    args = (x, lengths, *tables, skip, before, add, y, end if count == 1 else None)
    _run(kernels.outputs, batch * count, x, ndim, *args, **direction)
    return y, end, before


def _forward(x, lengths, start, skip, *tables: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
    y, entering = None, []
    for direction in reversed(range(len(tables[0]))):
        # The backward direction's outputs are in float32, since they are rounded with those of the forward direction.
        args = (None, None, None, skip.dtype) if direction else (skip, start, y, x.dtype)
        of_direction = [t[direction] for t in tables]
        y, end, before = _pass(x, lengths, of_direction, *args, BACK=bool(direction), GRADIENT=False)
        entering.insert(0, before)
    return y, end, _stack(entering) if _segments(x)[0] > 1 else skip.new_empty(0)


def _backward(grads, saved, x, lengths, start, skip, *tables: Tensor) -> List[Tensor]:
    dy, dend, _ = (None if t is None else t.contiguous() for t in grads)
    dy = torch.zeros_like(x) if dy is None else dy
    dx, dtables, (_, entering) = None, [], saved
    for direction in reversed(range(len(tables[0]))):
        log_decay, expand, project = of_direction = [t[direction] for t in tables]
        args = (None, None, None, skip.dtype) if direction else (skip, dend, dx, x.dtype)
        dx, dstart, after = _pass(dy, lengths, (log_decay, project, expand), *args, BACK=not direction, GRADIENT=True)
        before = entering[direction] if _segments(x)[0] > 1 else None if direction else start
        gradients, dskip = _coefficient_gradients(x, dy, lengths, of_direction, before, after, BACK=bool(direction))
        dtables.insert(0, gradients)
    return [dx, *([] if start is None else [dstart]), dskip, *map(_stack, zip(*dtables))]


def _stack(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack(tensors) if len(tensors) > 1 else tensors[0].unsqueeze(0)  # not a copy


def _coefficient_gradients(
    x: Tensor,
    dy: Tensor,
    lengths: Optional[Tensor],
    tables: Sequence[Tensor],
    before: Optional[Tensor],
    after: Optional[Tensor],
    BACK: bool,
) -> Tuple[List[Tensor], Tensor]:
    """The gradients of log_decay, expand and project (N, D), and of skip."""
    total, shape = x.size(0) * _segments(x)[0], tables[0].shape
    parts = min(total, PARTS)
    dtables, dskip = tables[0].new_empty(parts, 3, *shape), tables[0].new_empty(parts, shape[1])
    args = (x, dy, lengths, *tables, before, after, dtables, dskip, total)
    _run(kernels.coefficient_gradients, parts, x, shape[0], *args, BACK=BACK)
    return [t.sum(0) for t in dtables.unbind(1)], dskip.sum(0)


def _fake(x, lengths, start, skip, log_decay, expand, project):
    directions, *shape = log_decay.shape
    count, _ = _segments(x)
    entering = skip.new_empty(directions, x.size(0), count, *shape) if count > 1 else skip.new_empty(0)
    return torch.empty_like(x), skip.new_empty(x.size(0), *shape), entering


# y, the state of the first direction after it (B, N, D), and the states before several segments (R, B, K, N, D).
_ema = operator(
    "ema_triton",
    "Tensor x, Tensor? lengths, Tensor? start, Tensor skip, Tensor log_decay, Tensor expand, Tensor project",
    "(Tensor, Tensor, Tensor)",
    _forward,
    _fake,
    _backward,
)


# ---------------------------------------------------------------------------------------------- single tokens


def _token_fake(x, log_decay, expand, project, state, skip, silu) -> Tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), expand.new_empty(state.shape)


def _token(x, log_decay, expand, project, state, skip, silu) -> Tuple[Tensor, Tensor]:
    y, after = _token_fake(x, log_decay, expand, project, state, skip, silu)
    rows, dim, ndim = state.shape
    tensors = (x, state.to(after.dtype), log_decay, expand, project, None if skip is None else skip.to(after.dtype))
    tensors = (None if t is None else t.contiguous() for t in tensors)
    together = 4 if rows >= MANY_ROWS else 1
    sizes = {"N": ndim, "PADDED": triton.next_power_of_2(ndim), "C": TOKEN_CHANNELS, "ROWS": together, "SILU": silu}
    grid = (triton.cdiv(rows, together), triton.cdiv(dim, TOKEN_CHANNELS))
    launch(kernels.token, grid, *tensors, y, after, rows, dim, **sizes)
    return y, after


# x (R, D), coefficients (1, D, N), state (R, D, N) -> y or silu(y) (R, D), the next state.
ema_token_triton = without_gradient(
    "ema_token",
    "Tensor x, Tensor log_decay, Tensor expand, Tensor project, Tensor state, Tensor? skip, bool silu",
    "(Tensor, Tensor)",
    _token,
    _token_fake,
)


# ---------------------------------------------------------------------------------------------- coefficients


def _coefficients_forward(alpha, delta, beta, eta) -> Tuple[Tensor, ...]:
    tables = _coefficients_fake(alpha, delta, beta, eta)
    _run_coefficients(kernels.coefficients, alpha, delta, beta, eta, *tables)
    return tables


def _coefficients_fake(alpha, delta, beta, eta) -> Tuple[Tensor, ...]:
    directions, dim, ndim = alpha.shape
    dtype = at_least_float32(alpha.dtype)
    return tuple(alpha.new_empty(directions, ndim, dim, dtype=dtype) for _ in range(3))


def _coefficients_backward(grads, saved, *logits: Tensor) -> List[Tensor]:
    grads = [torch.zeros_like(saved[0]) if t is None else t.contiguous() for t in grads]
    dlogits = [t.new_empty(t.shape) for t in logits]
    _run_coefficients(kernels.coefficients_backward, *logits[:3], *grads, *dlogits)
    return dlogits


def _run_coefficients(kernel: Any, alpha: Tensor, *args: Tensor) -> None:
    directions, dim, ndim = alpha.shape
    _launch(kernel, directions, dim, ndim, alpha, *args, dim, SCALE=math.sqrt(1.0 / ndim), LARGEST=LARGEST_LOGIT)


# log_decay, expand and project (R, N, D), in float32 or better, by one kernel and one for the gradients.
_coefficients = operator(
    "ema_coefficients",
    "Tensor alpha, Tensor delta, Tensor beta, Tensor eta",
    "(Tensor, Tensor, Tensor)",
    _coefficients_forward,
    _coefficients_fake,
    _coefficients_backward,
)
