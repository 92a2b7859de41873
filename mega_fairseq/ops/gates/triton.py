"""The elementwise parts of `gated_output` as Triton kernels, for NVIDIA GPUs: two forward and two backward.

Base is X' (W_u, W_r, W_h) + b, its rows D + E + D wide, or D + E without W_h. Everything is computed in float32 or
better; only what matrix products need is stored.
"""

from typing import Any, List, Tuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mega_fairseq.ops.backend import launch
from mega_fairseq.ops.gates.tiles import Rows
from mega_fairseq.ops.precision import at_least_float32

BLOCK = 1024  # columns of a program
WIDE = {torch.float32: tl.float32, torch.float64: tl.float64}


@triton.jit
def _at(width, stride, offset, BLOCK: tl.constexpr):
    """Where this program's elements are in rows of `width`, and in rows of `stride` from column `offset` on."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    return row * width + column, row * stride + offset + column, column < width


@triton.jit
def silu(x):
    """silu(x) and its derivative."""
    sigmoid = tl.sigmoid(x)
    return x * sigmoid, sigmoid * (1.0 + x * (1.0 - sigmoid))


@triton.jit
def reset_gate(x):
    """The activation of the reset gate, the same as RESET in naive.py, and its derivative."""
    return silu(x)


@triton.jit
def reset(base, attended, mixed, stride, D, E, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """mixed = r O with r = reset_gate(base[:, D : D + E])."""
    at, at_base, inside = _at(E, stride, D, BLOCK)
    r, _ = reset_gate(tl.load(base + at_base, mask=inside, other=0.0).to(WIDE))
    o = tl.load(attended + at, mask=inside, other=0.0).to(WIDE)
    tl.store(mixed + at, (r * o).to(mixed.dtype.element_ty), mask=inside)


@triton.jit
def reset_backward(
    base, attended, dmixed, dbase, dattended, mixed, stride, D, E, BLOCK: tl.constexpr, WIDE: tl.constexpr
):
    """From the gradient of mixed, those of base and O; and mixed again, for the gradient of U_h."""
    at, at_base, inside = _at(E, stride, D, BLOCK)
    r, slope = reset_gate(tl.load(base + at_base, mask=inside, other=0.0).to(WIDE))
    o = tl.load(attended + at, mask=inside, other=0.0).to(WIDE)
    grad = tl.load(dmixed + at, mask=inside, other=0.0).to(WIDE)
    tl.store(dbase + at_base, (grad * o * slope).to(dbase.dtype.element_ty), mask=inside)
    tl.store(dattended + at, (grad * r).to(dattended.dtype.element_ty), mask=inside)
    tl.store(mixed + at, (r * o).to(mixed.dtype.element_ty), mask=inside)


@triton.jit
def update(
    base, before, residual, keep, y, stride, offset, D,
    HIDDEN: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """y = X + u (H - X) with H = silu(before), dropped out; HIDDEN: base[:, offset:] is first added to `before`."""
    at, at_base, inside = _at(D, stride, 0, BLOCK)
    c = tl.load(before + at, mask=inside, other=0.0).to(WIDE)
    if HIDDEN:
        c += tl.load(base + at_base + offset, mask=inside, other=0.0).to(WIDE)
        tl.store(before + at, c.to(before.dtype.element_ty), mask=inside)
    h, _ = silu(c)
    if keep is not None:
        h *= tl.load(keep + at, mask=inside, other=0).to(WIDE) * tl.full([1], SCALE, WIDE)
    x = tl.load(residual + at, mask=inside, other=0.0).to(WIDE)
    u = tl.sigmoid(tl.load(base + at_base, mask=inside, other=0.0).to(WIDE))
    tl.store(y + at, (x + u * (h - x)).to(y.dtype.element_ty), mask=inside)


@triton.jit
def update_backward(
    base, before, residual, keep, dy, dbase, dresidual, dbefore, stride, offset, D,
    HIDDEN: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """From the gradient of y, those of base, of X and of `before`."""
    at, at_base, inside = _at(D, stride, 0, BLOCK)
    c = tl.load(before + at, mask=inside, other=0.0).to(WIDE)
    x = tl.load(residual + at, mask=inside, other=0.0).to(WIDE)
    grad = tl.load(dy + at, mask=inside, other=0.0).to(WIDE)
    u = tl.sigmoid(tl.load(base + at_base, mask=inside, other=0.0).to(WIDE))
    h, slope = silu(c)
    dh = grad * u
    tl.store(dresidual + at, (grad - dh).to(dresidual.dtype.element_ty), mask=inside)
    if keep is not None:
        kept = tl.load(keep + at, mask=inside, other=0).to(WIDE) * tl.full([1], SCALE, WIDE)
        h, dh = h * kept, dh * kept
    tl.store(dbase + at_base, (grad * (h - x) * u * (1.0 - u)).to(dbase.dtype.element_ty), mask=inside)
    dc = (dh * slope).to(dbefore.dtype.element_ty)
    tl.store(dbefore + at, dc, mask=inside)
    if HIDDEN:
        tl.store(dbase + at_base + offset, dc, mask=inside)


def _launch(kernel: Any, rows: int, width: int, like: Tensor, *args: Any, **options: Any) -> None:
    block = min(BLOCK, triton.next_power_of_2(width))
    wide = WIDE[at_least_float32(like.dtype)]
    launch(kernel, (rows, triton.cdiv(width, block)), *args, **options, BLOCK=block, WIDE=wide)


def forward(inputs: Rows) -> Tuple[Tensor, Tensor, Tensor]:
    """As in tiles.py, with silu. Matrix products are torch's."""
    gate_input, attended, residual, weight, bias, hidden, hidden_bias, keep, scale, _ = inputs
    attended, residual, keep = (None if t is None else t.contiguous() for t in (attended, residual, keep))
    base = torch.addmm(bias, gate_input, weight.t())
    (rows, dim), width, stride = residual.shape, attended.size(1), base.size(1)
    mixed, y = torch.empty_like(attended), torch.empty_like(residual)
    _launch(reset, rows, width, residual, base, attended, mixed, stride, dim, width)
    before = torch.addmm(hidden_bias, mixed, hidden.t())
    args = (base, before, residual, keep, y, stride, dim + width, dim)
    _launch(update, rows, dim, residual, *args, HIDDEN=stride > dim + width, SCALE=scale)
    return y, base, before


def backward(dy: Tensor, inputs: Rows, base: Tensor, before: Tensor) -> List[Tensor]:
    gate_input, attended, residual, weight, _, hidden, _, keep, scale, _ = inputs
    attended, residual, keep = (None if t is None else t.contiguous() for t in (attended, residual, keep))
    (rows, dim), width, stride = residual.shape, attended.size(1), base.size(1)
    dbase, dbefore, dresidual = (torch.empty_like(t) for t in (base, before, residual))
    dattended, mixed = (torch.empty_like(attended) for _ in range(2))
    args = (base, before, residual, keep, dy.contiguous(), dbase, dresidual, dbefore, stride, dim + width, dim)
    _launch(update_backward, rows, dim, residual, *args, HIDDEN=stride > dim + width, SCALE=scale)
    dmixed = torch.mm(dbefore, hidden)
    args = (base, attended, dmixed, dbase, dattended, mixed, stride, dim, width)
    _launch(reset_backward, rows, width, residual, *args)
    of_gates = (torch.mm(dbase.t(), gate_input), dbase.sum(0))
    of_hidden = (torch.mm(dbefore.t(), mixed), dbefore.sum(0))
    return [torch.mm(dbase, weight), dattended, dresidual, *of_gates, *of_hidden]
