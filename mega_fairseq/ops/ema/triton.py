"""The damped EMA by Triton kernels, on NVIDIA GPUs.

Rows are cut into segments of T steps, which are computed in parallel, by three kernels:

    sums      what the steps of each segment add to the state after it
    scan      from these, the state before each segment and the state after all of them
    outputs   from the state before a segment, its outputs

The gradient of x is the EMA of dy in the opposite direction, with `expand` and `project` exchanged: the same kernels.
`gradients` then computes those of the coefficients.
"""

import math
from functools import partial
from typing import Any, NamedTuple, Optional, Sequence, Tuple

import torch
import triton
from torch import Tensor

from mega_fairseq.ops.backend import launch
from mega_fairseq.ops.derivatives import once_differentiable
from mega_fairseq.ops.ema import kernels
from mega_fairseq.ops.ema.naive import LARGEST_LOGIT
from mega_fairseq.ops.precision import at_least_float32

CHANNELS = 32  # of a program: one warp
MIN_STEPS, MAX_STEPS = 32, 512  # of a segment
PROGRAMS = 4096  # enough to fill a GPU; where there would be more, segments are longer
PARTS = 128  # of the gradients of coefficients, which are added at the end


def _launch(kernel: Any, programs: int, dim: int, ndim: int, *given: Any, **options: Any) -> None:
    sizes = {"N": ndim, "PADDED": triton.next_power_of_2(ndim), "C": CHANNELS}
    launch(kernel, (programs, triton.cdiv(dim, CHANNELS)), *given, **sizes, **options, num_warps=1)


class _Cut(NamedTuple):
    """Rows of L steps, or of `lengths`, in K segments of T steps.

    T depends on the size of the batch, which may change the last digits of a row's results.
    """

    lengths: Optional[Tensor]
    steps: int
    count: int

    @classmethod
    def of(cls, x: Tensor, lengths: Optional[Tensor]) -> "_Cut":
        batch, length, dim = x.shape
        steps = batch * length * triton.cdiv(dim, CHANNELS) // PROGRAMS
        steps = min(length, max(MIN_STEPS, min(MAX_STEPS, steps)))
        return cls(lengths, steps, triton.cdiv(length, steps))

    def run(self, x: Tensor, ndim: int, kernel: Any, programs: int, *given: Any, **options: bool) -> None:
        _, length, dim = x.shape
        _launch(kernel, programs, dim, ndim, *given, length, self.steps, dim, self.count, **options)


def _pass(
    x: Tensor,
    cut: _Cut,
    tables: Tensor,
    skip: Optional[Tensor] = None,
    start: Optional[Tensor] = None,
    add: Optional[Tensor] = None,
    dtype: Optional[torch.dtype] = None,
    *,
    back: bool,
    gradient: bool,
) -> Tuple[Tensor, Tensor, Optional[Tensor]]:
    """y in `dtype` or x's, the state after all steps (B, N, D), and the states before segments (B, K, N, D)."""
    batch, (_, *shape) = x.size(0), tables.shape
    y, end, before = torch.empty_like(x, dtype=dtype), tables.new_empty(batch, *shape), start
    run = partial(cut.run, x, shape[0])
    if cut.count > 1:
        before, sums = (tables.new_empty(batch, cut.count, *shape) for _ in range(2))
        run(kernels.sums, batch * cut.count, x, cut.lengths, tables, sums, BACK=back, GRADIENT=gradient)
        run(kernels.scan, batch, sums, cut.lengths, tables, start, before, end, BACK=back)
    given = (x, cut.lengths, tables, skip, before, add, y, end if cut.count == 1 else None)
    run(kernels.outputs, batch * cut.count, *given, BACK=back, GRADIENT=gradient)
    return y, end, before


def _of_tables(
    x: Tensor, dy: Tensor, cut: _Cut, tables: Tensor, before: Optional[Tensor], after: Optional[Tensor], back: bool
) -> Tuple[Tensor, Tensor]:
    """The gradients of tables and of skip."""
    segments = x.size(0) * cut.count
    parts = min(segments, PARTS)
    found, of_skip = tables.new_empty(parts, *tables.shape), tables.new_empty(parts, x.size(2))
    given = (x, dy, cut.lengths, tables, before, after, found, of_skip, segments)
    cut.run(x, tables.size(1), kernels.gradients, parts, *given, BACK=back)
    return found.sum(0), of_skip.sum(0)


class _EMA(torch.autograd.Function):
    """The EMA of one direction or of both: `ahead` and `back` are tables (3, N, D) of log_decay, expand and project."""

    @staticmethod
    def forward(ctx, lengths, x, start, skip, ahead, back):
        cut, y, before_back = _Cut.of(x, lengths), None, None
        if back is not None:  # in float32, since it is rounded with the other direction
            y, _, before_back = _pass(x, cut, back, dtype=skip.dtype, back=True, gradient=False)
        y, end, before = _pass(x, cut, ahead, skip, start, y, back=False, gradient=False)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, lengths, skip, ahead, back, before, before_back)
        ctx.cut = cut.steps, cut.count
        return y, end

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, dend):
        x, lengths, skip, ahead, back, before, before_back = ctx.saved_tensors
        cut, dx, dback = _Cut(lengths, *ctx.cut), None, None
        dy = torch.zeros_like(x) if dy is None else dy.contiguous()
        dend = None if dend is None else dend.contiguous()
        if back is not None:
            dx, _, after = _pass(dy, cut, back, dtype=skip.dtype, back=False, gradient=True)
            dback, _ = _of_tables(x, dy, cut, back, before_back, after, back=True)
        dx, dstart, after = _pass(dy, cut, ahead, skip, dend, dx, x.dtype, back=True, gradient=True)
        dahead, dskip = _of_tables(x, dy, cut, ahead, before, after, back=False)
        return None, dx, dstart if ctx.needs_input_grad[2] else None, dskip, dahead, dback


class _Coefficients(torch.autograd.Function):
    """Tables (3, N, D) of log_decay, expand and project for each direction, in float32 or better."""

    @staticmethod
    def forward(ctx, *logits):
        ctx.save_for_backward(*logits)
        alpha = logits[0]
        directions, dim, ndim = alpha.shape
        tables = alpha.new_empty(directions, 3, ndim, dim, dtype=at_least_float32(alpha.dtype))
        ctx.constants = {"SCALE": math.sqrt(1.0 / ndim), "LARGEST": LARGEST_LOGIT}
        _launch(kernels.coefficients, directions, dim, ndim, *logits, tables, dim, **ctx.constants)
        return tuple(tables)

    @staticmethod
    @once_differentiable
    def backward(ctx, *of_directions):
        logits = ctx.saved_tensors
        given = torch.stack(of_directions)  # (directions, 3, N, D)
        directions, dim, ndim = logits[0].shape
        found = given.new_empty(directions, 4, ndim, dim)
        tensors = (*logits[:3], given, found)
        _launch(kernels.coefficients_backward, directions, dim, ndim, *tensors, dim, **ctx.constants)
        return tuple(of.to(t.dtype) for of, t in zip(found.transpose(2, 3).unbind(1), logits))


def triton_ema(
    x: Tensor,
    logits: Sequence[Tensor],
    state: Optional[Tensor] = None,
    skip: Optional[Tensor] = None,
    lengths: Optional[Tensor] = None,
) -> Tuple[Tensor, Tensor]:
    """x (B, L, D) -> y in x's dtype, zero after `lengths`, and the state of the forward direction after them.

    `logits` are those of alpha and delta, beta and eta: (1, D, N), or (2, D, N) for both directions.
    """
    for name, t in (("the EMA's parameters", logits[0]), ("the EMA state", state), ("lengths", lengths)):
        if t is not None and t.device != x.device:
            raise ValueError(f"{name} and x are on different devices, {t.device} and {x.device}; move one of them")
    tables = _Coefficients.apply(*(t.contiguous() for t in logits))
    ahead, back = (tables[0], None) if len(tables) == 1 else tables
    state = None if state is None else state.to(ahead.dtype).transpose(1, 2).contiguous()
    skip = ahead.new_zeros(x.size(2)) if skip is None else skip.to(ahead.dtype).contiguous()
    lengths = None if lengths is None else lengths.contiguous()
    y, end = _EMA.apply(lengths, x.contiguous(), state, skip, ahead, back)
    return y, end.transpose(1, 2)
