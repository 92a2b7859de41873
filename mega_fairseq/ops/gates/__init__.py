"""The position-wise part of the layer: activated projections (eq. 7, 10) and the gates of its output (eq. 12-15).

The fast forms process the rows in tiles that fit into the cache. A tile's activations and gradients are used at once
and never stored for the whole sequence, which takes less memory and, on the CPU, less time: allocating 32 MiB there
takes several times as long as an elementwise operation on them.
"""

from typing import Iterator, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mega_fairseq.ops.activations import ACTIVATIONS
from mega_fairseq.ops.backend import TRITON, backend
from mega_fairseq.ops.derivatives import once_differentiable
from mega_fairseq.ops.precision import at_least_float32, cast_dtype, is_compiling, without_autocast

TILE_ROWS = 512  # 512 x 2048 gates in float32 are 4 MiB


def _rows_together(x: Tensor) -> int:
    return min(TILE_ROWS, x.size(0)) if x.device.type == "cpu" else x.size(0)


def _tiles(x: Tensor) -> Iterator[slice]:
    """At least one, which is empty if there are no rows."""
    rows = max(1, _rows_together(x))
    return (slice(start, start + rows) for start in range(0, max(1, x.size(0)), rows))


def _flat(*tensors: Tensor) -> Tuple[Tensor, ...]:
    """(B, L, D) -> (B L, D), in autocast's dtype if autocast is on."""
    return tuple(t.to(cast_dtype(t)).flatten(0, -2) for t in tensors)


def _plus_product(total: Optional[Tensor], a: Tensor, b: Tensor) -> Tensor:
    """total + a^T b, in float32 or better from the second tile on."""
    if total is None:
        return torch.mm(a.t(), b)
    wide = at_least_float32(a.dtype)
    return total.addmm_(a.t(), b) if a.dtype == wide else total.to(wide).add_(torch.mm(a.t(), b))


def _plus_rows(total: Optional[Tensor], a: Tensor) -> Tensor:
    """total plus the sum of a's rows, in float32 or better, which a GPU rounds to a's dtype in the same kernel."""
    rows = a.sum(0, dtype=at_least_float32(a.dtype) if a.device.type == "cpu" else None)
    return rows if total is None else total.add_(rows)


def _cast(like: Tensor, *tensors: Optional[Tensor]) -> Tuple[Optional[Tensor], ...]:
    return tuple(None if t is None else t.to(like.dtype) for t in tensors)


# ------------------------------------------------------------------------------------------- activation(x W^T + b)


def activated_linear_naive(x: Tensor, weight: Tensor, bias: Tensor, activation: str = "silu") -> Tensor:
    """activation(x W^T + b)."""
    return ACTIVATIONS[activation].forward(F.linear(x, weight, bias))


class _ActivatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, activation):
        before = torch.addmm(bias, x, weight.t())
        ctx.save_for_backward(x, weight, before)
        ctx.activation = activation
        return ACTIVATIONS[activation].forward(before)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight, before = ctx.saved_tensors
        slope = ACTIVATIONS[ctx.activation].backward
        dx, dweight, dbias = torch.empty_like(x), None, None
        with without_autocast(x):
            for rows in _tiles(x):
                grad = slope(dy[rows], before[rows])
                torch.mm(grad, weight, out=dx[rows])
                dweight, dbias = _plus_product(dweight, grad, x[rows]), _plus_rows(dbias, grad)
        return dx, *_cast(weight, dweight, dbias), None


def activated_linear(x: Tensor, weight: Tensor, bias: Tensor, activation: str = "silu") -> Tensor:
    """activation(x W^T + b): (..., D) -> (..., E)."""
    if is_compiling():
        return activated_linear_naive(x, weight, bias, activation)
    (flat,) = _flat(x)
    with without_autocast(x):
        y = _ActivatedLinear.apply(flat, *_cast(flat, weight, bias), activation)
    return y.view(*x.shape[:-1], -1)


# ------------------------------------------------------------------------------------------- one gate and a projection


def gated_linear_naive(
    x: Tensor, attended: Tensor, gate: Tuple[Tensor, Tensor], output: Tuple[Tensor, Tensor], activation: str = "silu"
) -> Tensor:
    """(activation(X W + b) * O) W_o + b_o, with W and b of the gate and of the output."""
    return F.linear(activated_linear_naive(x, *gate, activation) * attended, *output)


class _GatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, attended, weight, bias, output, output_bias, activation):
        before = x.new_empty(x.size(0), weight.size(0))  # the gate before its activation
        y = x.new_empty(x.size(0), output.size(0))
        for rows in _tiles(x):
            gate = ACTIVATIONS[activation].forward(torch.addmm(bias, x[rows], weight.t(), out=before[rows]))
            torch.addmm(output_bias, gate * attended[rows], output.t(), out=y[rows])
        ctx.save_for_backward(x, attended, weight, output, before)
        ctx.activation = activation
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, attended, weight, output, before = ctx.saved_tensors
        act = ACTIVATIONS[ctx.activation]
        dx, dattended = torch.empty_like(x), torch.empty_like(attended)
        dweight = dbias = doutput = doutput_bias = None
        with without_autocast(x):
            for rows in _tiles(x):
                grad, gate = dy[rows], act.forward(before[rows])
                doutput = _plus_product(doutput, grad, gate * attended[rows])
                doutput_bias = _plus_rows(doutput_bias, grad)
                dgated = torch.mm(grad, output)
                torch.mul(dgated, gate, out=dattended[rows])
                dgate = act.backward(dgated.mul_(attended[rows]), before[rows])
                torch.mm(dgate, weight, out=dx[rows])
                dweight, dbias = _plus_product(dweight, dgate, x[rows]), _plus_rows(dbias, dgate)
        return dx, dattended, *_cast(weight, dweight, dbias, doutput, doutput_bias), None


def gated_linear(
    x: Tensor, attended: Tensor, gate: Tuple[Tensor, Tensor], output: Tuple[Tensor, Tensor], activation: str = "silu"
) -> Tensor:
    """`gated_linear_naive`, tile by tile: X (B, L, D), O (B, L, E) -> (B, L, D)."""
    if is_compiling():
        return gated_linear_naive(x, attended, gate, output, activation)
    rows = _flat(x, attended)
    with without_autocast(x):
        y = _GatedLinear.apply(*rows, *_cast(rows[0], *gate, *output), activation)
    return y.view(*x.shape[:-1], -1)


# ------------------------------------------------------------------------------------------- the gates of Mega


def gated_output_naive(
    gate_input: Tensor,
    attended: Tensor,
    residual: Tensor,
    gates: Tuple[Tensor, Tensor],
    hidden: Tuple[Tensor, Tensor],
    activation: str = "silu",
    keep: Optional[Tensor] = None,
    scale: float = 1.0,
) -> Tensor:
    """Y = u H + (1 - u) X with the gates from one projection of X' (eq. 12-15), all (..., width):

    u = sigmoid(X' W_u + b_u), r = silu(X' W_r + b_r), H = activation(X' W_h + (r O) U_h + b_h).

    gates: weight and bias of (u, r, h), rows D + E + D, or only of (u, r) if H does not depend on X' (cross
    attention). hidden: U_h and its bias. keep, scale: dropout on H. Y has the dtype of X, also under autocast.
    """
    dim, width = residual.size(-1), attended.size(-1)
    base = F.linear(gate_input, *gates)
    update_gate, reset_gate = torch.sigmoid(base[..., :dim]), F.silu(base[..., dim : dim + width])
    candidate = F.linear(reset_gate * attended, *hidden)
    if base.size(-1) > dim + width:
        candidate = candidate + base[..., dim + width :]
    candidate = ACTIVATIONS[activation].forward(candidate)
    if keep is not None:
        candidate = candidate * keep * scale
    return residual + update_gate * (candidate - residual)


class _GatedOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_input, attended, residual, weight, bias, hidden, hidden_bias, keep, scale, activation):
        rows_total, dim, width = residual.size(0), residual.size(1), attended.size(1)
        base = gate_input.new_empty(rows_total, weight.size(0))
        before = gate_input.new_empty(rows_total, dim)  # the candidate before its activation
        y = torch.empty_like(residual)
        for rows in _tiles(residual):
            gate = torch.addmm(bias, gate_input[rows], weight.t(), out=base[rows])
            mixed = F.silu(gate[:, dim : dim + width]).mul_(attended[rows])
            candidate = torch.addmm(hidden_bias, mixed, hidden.t(), out=before[rows])
            if gate.size(1) > dim + width:
                candidate += gate[:, dim + width :]
            candidate = ACTIVATIONS[activation].forward(candidate)
            if keep is not None:
                candidate = candidate * keep[rows] * scale
            torch.lerp(residual[rows], *_cast(residual, candidate, torch.sigmoid(gate[:, :dim])), out=y[rows])
        ctx.save_for_backward(gate_input, attended, residual, weight, hidden, base, before, keep)
        ctx.scale, ctx.activation = scale, activation
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        gate_input, attended, residual, weight, hidden, base, before, keep = ctx.saved_tensors
        act = ACTIVATIONS[ctx.activation]
        dim, width = residual.size(1), attended.size(1)
        dinput, dattended, dresidual = (torch.empty_like(t) for t in (gate_input, attended, residual))
        dweight = dbias = dhidden = dhidden_bias = None
        dbase = base.new_empty(_rows_together(base), base.size(1))
        with without_autocast(base):
            for rows in _tiles(residual):
                gate, grad = base[rows], dy[rows]
                dgate = dbase[: gate.size(0)]
                update = torch.sigmoid(gate[:, :dim]).to(residual.dtype)
                reset_before = gate[:, dim : dim + width]
                reset = F.silu(reset_before)
                candidate = act.forward(before[rows])
                if keep is not None:
                    candidate = candidate * keep[rows] * ctx.scale
                dcandidate = grad * update
                torch.sub(grad, dcandidate, out=dresidual[rows])
                dupdate = (candidate - residual[rows]).mul_(dcandidate)
                torch.addcmul(dupdate, dupdate, update, value=-1.0, out=dgate[:, :dim])
                if keep is not None:
                    dcandidate = dcandidate * keep[rows] * ctx.scale
                dcandidate = act.backward(dcandidate.to(before.dtype), before[rows])
                dhidden = _plus_product(dhidden, dcandidate, reset * attended[rows])
                dhidden_bias = _plus_rows(dhidden_bias, dcandidate)
                if weight.size(0) > dim + width:
                    dgate[:, dim + width :] = dcandidate
                dmixed = torch.mm(dcandidate, hidden)
                torch.mul(dmixed, reset, out=dattended[rows])
                dreset = dmixed.mul_(attended[rows])
                dgate[:, dim : dim + width] = torch.ops.aten.silu_backward(dreset, reset_before)
                torch.mm(dgate, weight, out=dinput[rows])
                dweight, dbias = _plus_product(dweight, dgate, gate_input[rows]), _plus_rows(dbias, dgate)
        sums = _cast(weight, dweight, dbias, dhidden, dhidden_bias)
        return dinput, dattended, dresidual, *sums, None, None, None


def gated_output(
    gate_input: Tensor,
    attended: Tensor,
    residual: Tensor,
    gates: Tuple[Tensor, Tensor],
    hidden: Tuple[Tensor, Tensor],
    activation: str = "silu",
    keep: Optional[Tensor] = None,
    scale: float = 1.0,
) -> Tensor:
    """`gated_output_naive`, tile by tile or by Triton kernels: X', O, X (B, L, .) -> Y (B, L, D)."""
    if is_compiling():
        return gated_output_naive(gate_input, attended, residual, gates, hidden, activation, keep, scale)
    rows = (*_flat(gate_input, attended), residual.flatten(0, -2))
    keep = None if keep is None else keep.expand(residual.shape).flatten(0, -2)
    with without_autocast(residual):
        given = (*rows, *_cast(rows[0], *gates, *hidden), keep, scale)
        if activation == "silu" and backend(residual.device) == TRITON:
            from mega_fairseq.ops.gates.triton import TritonGates  # here, since Triton may be missing

            y = TritonGates.apply(*given)
        else:
            y = _GatedOutput.apply(*given, activation)
    return y.view(residual.shape)
