"""The elementwise parts of `gated_output` as Triton kernels, for NVIDIA GPUs: two forward and two backward.

Base is X' (W_u, W_r, W_h) + b, its rows D + E + D wide, or D + E without W_h. Everything is computed in float32 or
better; only what matrix products need is stored. The candidate before b_h and silu is in the place of X' W_h + b, to
which its product is added, or in a tensor of its own if there is no W_h; so is its gradient.
"""

from typing import List, Optional, Tuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mega_fairseq.ops.dense.triton import before_activation
from mega_fairseq.ops.gates import tiles as plain
from mega_fairseq.ops.gates.naive import RESET_ACTIVATION, Projection
from mega_fairseq.ops.gates.tiles import Rows
from mega_fairseq.ops.operators import without_gradient
from mega_fairseq.ops.rows import (
    add_both_sums,
    add_sums,
    all_tiles,
    launch_rows,
    new_sums,
    silu,
    store_sums,
    sum_of_rows,
    tile,
    tile_count,
    with_rows,
)

reset_gate = {"silu": silu}[RESET_ACTIVATION]  # returns the activation and its derivative


@triton.jit
def gate(
    before, attended, mixed, R, stride, E,
    RESET: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """mixed = r O, where r is Mega's reset gate or, without RESET, silu of `before`."""
    row, column, inside = tile(0, R, E, ROWS, COLUMNS)
    at = row * E + column
    b = tl.load(before + row * stride + column, mask=inside, other=0.0).to(WIDE)
    if RESET:
        r, _ = reset_gate(b)
    else:
        r, _ = silu(b)
    o = tl.load(attended + at, mask=inside, other=0.0).to(WIDE)
    tl.store(mixed + at, (r * o).to(mixed.dtype.element_ty), mask=inside)


@triton.jit
def gate_backward(
    base, attended, mixed, dbase, dattended, sums, R, stride, D, E, sums_stride,
    RESET: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """From the gradient of mixed, those of base and O; and mixed, in its gradient's place, for the gradient of U_h."""
    total = tl.zeros([ROWS, COLUMNS], WIDE)
    for turn in range(tile_count(R, ROWS)):
        row, column, inside = tile(turn, R, E, ROWS, COLUMNS)
        at, at_base = row * E + column, row * stride + D + column
        b = tl.load(base + at_base, mask=inside, other=0.0).to(WIDE)
        if RESET:
            r, slope = reset_gate(b)
        else:
            r, slope = silu(b)
        o = tl.load(attended + at, mask=inside, other=0.0).to(WIDE)
        grad = tl.load(mixed + at, mask=inside, other=0.0).to(WIDE)
        before = grad * o * slope
        tl.store(dbase + at_base, before.to(dbase.dtype.element_ty), mask=inside)
        tl.store(dattended + at, (grad * r).to(dattended.dtype.element_ty), mask=inside)
        tl.store(mixed + at, (r * o).to(mixed.dtype.element_ty), mask=inside)
        total += before
    store_sums(sums + D, total, sums_stride, E, COLUMNS)


@triton.jit
def update(
    base, candidate, bias, more, residual, keep, y, R, stride, candidate_stride, D,
    SCALE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """y = X + u (H - X) with H = silu(candidate + b_h), dropped out, or H = silu(candidate + more)."""
    row, column, inside = tile(0, R, D, ROWS, COLUMNS)
    at, at_candidate = row * D + column, row * candidate_stride + column
    before = tl.load(candidate + at_candidate, mask=inside, other=0.0).to(WIDE)
    if bias is not None:
        before += tl.load(bias + column, mask=column < D, other=0.0).to(WIDE)
    if more is not None:
        before += tl.load(more + at, mask=inside, other=0.0).to(WIDE)
    h, _ = silu(before)
    if keep is not None:
        h *= tl.load(keep + at, mask=inside, other=0).to(WIDE) * tl.full([1, 1], SCALE, WIDE)
    x = tl.load(residual + at, mask=inside, other=0.0).to(WIDE)
    u = tl.sigmoid(tl.load(base + row * stride + column, mask=inside, other=0.0).to(WIDE))
    tl.store(y + at, (x + u * (h - x)).to(y.dtype.element_ty), mask=inside)


@triton.jit
def update_backward(
    base, candidate, bias, residual, keep, dy, dbase, dcandidate, dresidual, sums, R, stride, candidate_stride, D, E,
    sums_stride, SCALE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """From the gradient of y, those of base, of X and of the candidate."""
    total_update, total_candidate = tl.zeros([ROWS, COLUMNS], WIDE), tl.zeros([ROWS, COLUMNS], WIDE)
    for turn in range(tile_count(R, ROWS)):
        row, column, inside = tile(turn, R, D, ROWS, COLUMNS)
        at, at_base, at_candidate = row * D + column, row * stride + column, row * candidate_stride + column
        b = tl.load(bias + column, mask=column < D, other=0.0).to(WIDE)
        h, slope = silu(tl.load(candidate + at_candidate, mask=inside, other=0.0).to(WIDE) + b)
        x = tl.load(residual + at, mask=inside, other=0.0).to(WIDE)
        grad = tl.load(dy + at, mask=inside, other=0.0).to(WIDE)
        u = tl.sigmoid(tl.load(base + at_base, mask=inside, other=0.0).to(WIDE))
        dh = grad * u
        tl.store(dresidual + at, (grad - dh).to(dresidual.dtype.element_ty), mask=inside)
        if keep is not None:
            kept = tl.load(keep + at, mask=inside, other=0).to(WIDE) * tl.full([1, 1], SCALE, WIDE)
            h, dh = h * kept, dh * kept
        du, dc = grad * (h - x) * u * (1.0 - u), dh * slope
        tl.store(dbase + at_base, du.to(dbase.dtype.element_ty), mask=inside)
        tl.store(dcandidate + at_candidate, dc.to(dcandidate.dtype.element_ty), mask=inside)
        total_update += du
        total_candidate += dc
    store_sums(sums, total_update, sums_stride, D, COLUMNS)
    store_sums(sums + D + E, total_candidate, sums_stride, D, COLUMNS)


def forward(inputs: Rows) -> Tuple[Tensor, Tensor, Tensor]:
    """Y, base, and the candidate if it is not in base, otherwise nothing. Matrix products are torch's."""
    gate_input, attended, residual, weight, bias, hidden, hidden_bias, keep, scale, _ = inputs
    base = torch.addmm(bias, gate_input, weight.t())
    dim, width = residual.size(1), attended.size(1)
    mixed = _gated(base[:, dim : dim + width], attended, True)
    if base.size(1) > dim + width:
        separate = base.new_empty(0)
        candidate = base[:, dim + width :].addmm_(mixed, hidden.t())
    else:
        separate = candidate = torch.mm(mixed, hidden.t())
    return _update_gate(base, candidate, None, residual, hidden_bias, keep, scale), base, separate


def backward(dy: Tensor, inputs: Rows, base: Tensor, separate: Tensor) -> List[Tensor]:
    """As in tiles.py, with silu."""
    gate_input, attended, residual, weight, _, hidden, hidden_bias, keep, scale, _ = inputs
    tensors = (attended, residual, hidden_bias, keep)
    attended, residual, hidden_bias, keep = (None if t is None else t.contiguous() for t in tensors)
    (rows, dim), width, stride = residual.shape, attended.size(1), base.size(1)
    dbase, dresidual, dattended = (torch.empty_like(t) for t in (base, residual, attended))
    if stride > dim + width:
        candidate, dcandidate = (t[:, dim + width :] for t in (base, dbase))
    else:
        candidate, dcandidate = separate, torch.empty_like(separate)
    sums = new_sums(residual, 2 * dim + width)
    args = (base, candidate, hidden_bias, residual, keep, dy.contiguous(), dbase, dcandidate, dresidual, sums)
    sizes = (rows, stride, candidate.stride(0), dim, width, sums.size(1))
    launch_rows(update_backward, len(sums), dim, residual, *args, *sizes, SCALE=scale)
    mixed = torch.mm(dcandidate, hidden)  # its gradient, which the kernel replaces
    args = (base, attended, mixed, dbase, dattended, sums, rows, stride, dim, width, sums.size(1))
    launch_rows(gate_backward, len(sums), width, residual, *args, RESET=True)
    dbias, dhidden_bias = add_both_sums(sums, weight.dtype, stride, dim + width)
    of_gates, of_hidden = (torch.mm(dbase.t(), gate_input), dbias), (torch.mm(dcandidate.t(), mixed), dhidden_bias)
    return [torch.mm(dbase, weight), dattended, dresidual, *of_gates, *of_hidden]


# ------------------------------------------------------------------------------------------ products with a gate


def product(before: Tensor, values: Optional[Tensor], activation: str) -> Tensor:
    if values is None or activation != "silu":
        return plain.product(before, values, activation)
    return _gated(before, values, False)


def product_backward(
    grad: Tensor, before: Tensor, values: Optional[Tensor], dvalues: Optional[Tensor], activation: str
) -> Tuple[Tensor, Tensor, Tensor]:
    """As in tiles.py. With silu and values, the product is in the place of its gradient."""
    if activation != "silu":
        return plain.product_backward(grad, before, values, dvalues, activation, sum_of_rows)
    if values is None:
        product = torch.empty_like(before)
        return (product, *before_activation(grad, before, activation, product))
    (rows, width), dbefore, sums = before.shape, torch.empty_like(before), new_sums(before, before.size(1))
    args = (before, values.contiguous(), grad, dbefore, dvalues, sums, rows, width, 0, width, width)
    launch_rows(gate_backward, len(sums), width, before, *args, RESET=False)
    return grad, dbefore, add_sums(sums, before.dtype)


# ---------------------------------------------------------------------------------------------- without gradients


def _gated(before: Tensor, values: Tensor, reset: bool) -> Tensor:
    before, values = with_rows(before), values.contiguous()
    mixed, (rows, width), stride = values.new_empty(values.shape), values.shape, before.stride(0)
    args = (before, values, mixed, rows, stride, width)
    launch_rows(gate, all_tiles(rows, width), width, mixed, *args, RESET=reset)
    return mixed


def _reset_gate(reset_before: Tensor, attended: Tensor) -> Tensor:
    return _gated(reset_before, attended, True)


def _reset_fake(reset_before: Tensor, attended: Tensor) -> Tensor:
    return attended.new_empty(attended.shape)


def _update_fake(update_before: Tensor, candidate: Tensor, more: Optional[Tensor], residual: Tensor) -> Tensor:
    return residual.new_empty(residual.shape)


def _update_gate(update_before, candidate, more, residual, bias=None, keep=None, scale=1.0) -> Tensor:
    """Also with the bias of the candidate and dropout, and of rows wider than the update gate."""
    update_before, candidate, y = with_rows(update_before), with_rows(candidate), residual.new_empty(residual.shape)
    others = (None if t is None else t.contiguous() for t in (bias, more, residual, keep))
    (rows, dim), strides = residual.shape, (update_before.stride(0), candidate.stride(0))
    args = (update_before, candidate, *others, y, rows, *strides, dim)
    launch_rows(update, all_tiles(rows, dim), dim, residual, *args, SCALE=scale)
    return y


# The two parts of `gate_output` for rows (R, width) of projections, which may be columns of a wider tensor.
reset_rows = without_gradient("reset_rows(Tensor reset_before, Tensor attended) -> Tensor", _reset_gate, _reset_fake)
update_rows = without_gradient(
    "update_rows(Tensor update_before, Tensor candidate, Tensor? more, Tensor residual) -> Tensor",
    _update_gate,
    _update_fake,
)


def gate_output(
    update_before: Tensor,
    reset_before: Tensor,
    candidate: Optional[Tensor],
    attended: Tensor,
    residual: Tensor,
    hidden: Projection,
    activation: str = "silu",
) -> Tensor:
    mixed = hidden(reset_rows(reset_before, attended))
    return update_rows(update_before, *((mixed, None) if candidate is None else (candidate, mixed)), residual)
