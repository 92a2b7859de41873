"""The damped EMA by Triton kernels, on NVIDIA GPUs.

Rows are cut into segments of T steps, which are computed in parallel, by three kernels:

    segment_sums    what the steps of each segment add to the state after it
    scan_segments   from these, the state before each segment and the state after all of them
    outputs         from the state before a segment, its outputs

The gradient of x is the EMA of dy in the opposite direction, with `expand` and `project` exchanged: the same kernels.
`coefficient_gradients` then computes those of the coefficients.
"""

import math
from typing import Any, NamedTuple, Optional, Tuple

import torch
import triton
from torch import Tensor

from mega_fairseq.ops.backend import launch
from mega_fairseq.ops.derivatives import once_differentiable
from mega_fairseq.ops.ema import kernels
from mega_fairseq.ops.ema.naive import LARGEST_LOGIT, EMACoefficients
from mega_fairseq.ops.precision import at_least_float32

CHANNELS = 32  # of a program: one warp
SEGMENT = 256  # steps of a segment, whatever the batch is, so that rows do not depend on it
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
    return EMACoefficients(*(t.transpose(1, 2) for t in tables.unbind()))


def _launch(kernel: Any, programs: int, dim: int, ndim: int, *args: Any, **options: Any) -> None:
    sizes = {"N": ndim, "PADDED": triton.next_power_of_2(ndim), "C": CHANNELS}
    launch(kernel, (programs, triton.cdiv(dim, CHANNELS)), *args, **sizes, **options, num_warps=1)


# ---------------------------------------------------------------------------------------------- the recurrence


class _Segments(NamedTuple):
    """Rows of L steps, or of `lengths`, in K segments of T steps."""

    lengths: Optional[Tensor]
    steps: int
    count: int

    @classmethod
    def of(cls, x: Tensor, lengths: Optional[Tensor]) -> "_Segments":
        steps = min(x.size(1), SEGMENT)
        return cls(lengths, steps, triton.cdiv(x.size(1), steps))

    def run(self, x: Tensor, ndim: int, kernel: Any, programs: int, *args: Any, **options: bool) -> None:
        _, length, dim = x.shape
        _launch(kernel, programs, dim, ndim, *args, length, self.steps, dim, self.count, **options)


def _pass(
    x: Tensor,
    segments: _Segments,
    tables: Tuple[Tensor, Tensor, Tensor],
    skip: Optional[Tensor],
    start: Optional[Tensor],
    add: Optional[Tensor],
    dtype: torch.dtype,
    **direction: bool,
) -> Tuple[Tensor, Tensor, Optional[Tensor]]:
    """One direction of log_decay, expand and project, (N, D) each, `add` added to its outputs.

    Returns y in `dtype`, the state after all steps (B, N, D), and the states before segments (B, K, N, D).
    """
    batch, count, (ndim, dim) = x.size(0), segments.count, tables[0].shape
    y, end, before = torch.empty_like(x, dtype=dtype), tables[0].new_empty(batch, ndim, dim), start
    if count > 1:
        before, sums = (tables[0].new_empty(batch, count, ndim, dim) for _ in range(2))
        args = (x, segments.lengths, *tables[:2], sums)
        segments.run(x, ndim, kernels.segment_sums, batch * count, *args, **direction)
        args = (sums, segments.lengths, tables[0], start, before, end)
        segments.run(x, ndim, kernels.scan_segments, batch, *args, BACK=direction["BACK"])
    args = (x, segments.lengths, *tables, skip, before, add, y, end if count == 1 else None)
    segments.run(x, ndim, kernels.outputs, batch * count, *args, **direction)
    return y, end, before


@torch.library.custom_op("mega::ema_triton", mutates_args=())
def _ema(
    x: Tensor,
    lengths: Optional[Tensor],
    start: Optional[Tensor],
    skip: Tensor,
    log_decay: Tensor,
    expand: Tensor,
    project: Tensor,
) -> Tuple[Tensor, Tensor, Tensor]:
    """y, the state of the first direction after it (B, N, D), and the states before segments (R, B, K, N, D), K > 1."""
    segments, y, entering = _Segments.of(x, lengths), None, []
    for direction in reversed(range(len(log_decay))):
        tables = (log_decay[direction], expand[direction], project[direction])
        # The backward direction's outputs are in float32, since they are rounded with those of the forward direction.
        args = (None, None, None, skip.dtype) if direction else (skip, start, y, x.dtype)
        y, end, before = _pass(x, segments, tables, *args, BACK=bool(direction), GRADIENT=False)
        entering.insert(0, before)
    return y, end, torch.stack(entering) if segments.count > 1 else skip.new_empty(0)


@torch.library.custom_op("mega::ema_triton_backward", mutates_args=())
def _ema_backward(
    dy: Tensor,
    dend: Optional[Tensor],
    x: Tensor,
    lengths: Optional[Tensor],
    start: Optional[Tensor],
    skip: Tensor,
    log_decay: Tensor,
    expand: Tensor,
    project: Tensor,
    entering: Tensor,
) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of x, start (B, N, D), skip, and of the three tables (R, 3, N, D)."""
    segments, dx, dtables = _Segments.of(x, lengths), None, []
    for direction in reversed(range(len(log_decay))):
        tables = (log_decay[direction], project[direction], expand[direction])
        args = (None, None, None, skip.dtype) if direction else (skip, dend, dx, x.dtype)
        dx, dstart, after = _pass(dy, segments, tables, *args, BACK=not direction, GRADIENT=True)
        before = entering[direction] if segments.count > 1 else None if direction else start
        tables = (log_decay[direction], expand[direction], project[direction])
        of_tables, dskip = _coefficient_gradients(x, dy, segments, tables, before, after, BACK=bool(direction))
        dtables.insert(0, of_tables)
    return dx, dstart, dskip, torch.stack(dtables)


def _coefficient_gradients(
    x: Tensor,
    dy: Tensor,
    segments: _Segments,
    tables: Tuple[Tensor, Tensor, Tensor],
    before: Optional[Tensor],
    after: Optional[Tensor],
    BACK: bool,
) -> Tuple[Tensor, Tensor]:
    """The gradients of log_decay, expand and project together (3, N, D), and of skip."""
    total, shape = x.size(0) * segments.count, tables[0].shape
    parts = min(total, PARTS)
    dtables, dskip = tables[0].new_empty(parts, 3, *shape), tables[0].new_empty(parts, shape[1])
    args = (x, dy, segments.lengths, *tables, before, after, dtables, dskip, total)
    segments.run(x, shape[0], kernels.coefficient_gradients, parts, *args, BACK=BACK)
    return dtables.sum(0), dskip.sum(0)


@_ema.register_fake
def _(x, lengths, start, skip, log_decay, expand, project):
    directions, *shape = log_decay.shape
    count = _Segments.of(x, lengths).count
    entering = skip.new_empty(directions, x.size(0), count, *shape) if count > 1 else skip.new_empty(0)
    return torch.empty_like(x), skip.new_empty(x.size(0), *shape), entering


@_ema_backward.register_fake
def _(dy, dend, x, lengths, start, skip, log_decay, expand, project, entering):
    directions, *shape = log_decay.shape
    tables = skip.new_empty(directions, 3, *shape)
    return torch.empty_like(x), skip.new_empty(x.size(0), *shape), torch.empty_like(skip), tables


def _save_ema(ctx, inputs, output):
    ctx.save_for_backward(*inputs, output[2])
    ctx.set_materialize_grads(False)


@once_differentiable
def _ema_gradients(ctx, dy, dend, _):
    x, lengths, start, *others = ctx.saved_tensors
    dy = torch.zeros_like(x) if dy is None else dy.contiguous()
    dend = None if dend is None else dend.contiguous()
    dx, dstart, dskip, dtables = _ema_backward(dy, dend, x, lengths, start, *others)
    return dx, None, None if start is None else dstart, dskip, *dtables.unbind(1)


_ema.register_autograd(_ema_gradients, setup_context=_save_ema)


# ---------------------------------------------------------------------------------------------- coefficients


@torch.library.custom_op("mega::ema_coefficients", mutates_args=())
def _coefficients(alpha: Tensor, delta: Tensor, beta: Tensor, eta: Tensor) -> Tensor:
    """log_decay, expand and project (3, R, N, D), in float32 or better."""
    directions, dim, ndim = alpha.shape
    tables = alpha.new_empty(3, directions, ndim, dim, dtype=at_least_float32(alpha.dtype))
    _launch(kernels.coefficients, directions, dim, ndim, alpha, delta, beta, eta, tables, dim, **_constants(ndim))
    return tables


@torch.library.custom_op("mega::ema_coefficients_backward", mutates_args=())
def _coefficients_backward(alpha: Tensor, delta: Tensor, beta: Tensor, dtables: Tensor) -> Tensor:
    """The gradients of alpha, delta, beta and eta (4, R, N, D)."""
    directions, dim, ndim = alpha.shape
    dlogits = dtables.new_empty(4, directions, ndim, dim)
    args = (alpha, delta, beta, dtables, dlogits, dim)
    _launch(kernels.coefficients_backward, directions, dim, ndim, *args, **_constants(ndim))
    return dlogits


def _constants(ndim: int) -> dict:
    return {"SCALE": math.sqrt(1.0 / ndim), "LARGEST": LARGEST_LOGIT}


@_coefficients.register_fake
def _(alpha, delta, beta, eta):
    directions, dim, ndim = alpha.shape
    return alpha.new_empty(3, directions, ndim, dim, dtype=at_least_float32(alpha.dtype))


@_coefficients_backward.register_fake
def _(alpha, delta, beta, dtables):
    return dtables.new_empty(4, *dtables.shape[1:])


def _save_logits(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


@once_differentiable
def _logit_gradients(ctx, dtables):
    *logits, eta = ctx.saved_tensors
    dlogits = _coefficients_backward(*logits, dtables.contiguous())
    return tuple(d.to(t.dtype) for d, t in zip(dlogits.transpose(2, 3).unbind(), (*logits, eta)))


_coefficients.register_autograd(_logit_gradients, setup_context=_save_logits)
