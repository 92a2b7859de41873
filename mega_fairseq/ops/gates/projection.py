"""A projection behind a gate, y = (f(x W_g^T + b_g) * v) W^T + b, of gated units and feed-forward layers.

Without values v, these are two projections with an activation between them. The operator saves x, v and what is before
f, and computes the gate and the product again in backward: half of what torch's own derivatives save.
"""

from typing import List, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mega_fairseq.ops.activations import ACTIVATIONS
from mega_fairseq.ops.backend import Forms, on_cpu
from mega_fairseq.ops.gates import tiles
from mega_fairseq.ops.operators import operator
from mega_fairseq.ops.precision import cast_dtype

Weights = Tuple[Tensor, Optional[Tensor]]  # a weight and a bias

# The parts of operators with gates.
FORMS = Forms(tiles, triton="mega_fairseq.ops.gates.triton")


def gated_projection_naive(
    x: Tensor, values: Optional[Tensor], gate: Weights, output: Weights, activation: str
) -> Tensor:
    hidden = ACTIVATIONS[activation].forward(F.linear(x, *gate))
    return F.linear(hidden if values is None else hidden * values, *output)


def _by_operator(x: Tensor, values: Optional[Tensor], gate: Weights, output: Weights, activation: str) -> Tensor:
    few = values is None and on_cpu(x) and x.numel() < tiles.TILE_ROWS * x.size(-1)  # a call takes more than it saves
    if few or not torch.is_grad_enabled():
        return gated_projection_naive(x, values, gate, output, activation)
    dtype = cast_dtype(x)  # autocast's, if it is on
    rows = (None if t is None else t.to(dtype).flatten(0, -2) for t in (x, values))
    y, _ = _gated_projection(*rows, *(None if t is None else t.to(dtype) for t in (*gate, *output)), activation)
    return y.view(*x.shape[:-1], y.size(1))


# x (..., in), values (..., e) or None -> (..., out); the gate has a bias.
gated_projection = Forms(gated_projection_naive, _by_operator)


def _forward(x, values, gate, gate_bias, weight, bias, activation) -> Tuple[Tensor, Tensor]:
    form, (y, before) = FORMS.of(x), _fake(x, values, gate, gate_bias, weight, bias, activation)
    for rows in tiles.row_slices(x):
        torch.addmm(gate_bias, x[rows], gate.t(), out=before[rows])
        product = form.product(before[rows], None if values is None else values[rows], activation)
        if bias is None:
            torch.mm(product, weight.t(), out=y[rows])
        else:
            torch.addmm(bias, product, weight.t(), out=y[rows])
    return y, before


def _fake(x, values, gate, gate_bias, weight, *_) -> Tuple[Tensor, Tensor]:
    return x.new_empty(x.size(0), weight.size(0)), x.new_empty(x.size(0), gate.size(0))


def _backward(grads, saved, x, values, gate, gate_bias, weight, bias, activation) -> List[Tensor]:
    form, (before,), dy = FORMS.of(x), saved, grads[0].contiguous()
    dx, dvalues = x.new_empty(x.shape), None if values is None else values.new_empty(values.shape)
    dgate = dgate_bias = dweight = dbias = None
    for rows in tiles.row_slices(x):
        grad = torch.mm(dy[rows], weight)  # of the product
        of_rows = (None if t is None else t[rows] for t in (values, dvalues))
        product, dbefore, sums = form.product_backward(grad, before[rows], *of_rows, activation)
        torch.mm(dbefore, gate, out=dx[rows])
        dgate, dgate_bias = tiles.plus_product(dgate, dbefore, x[rows]), tiles.plus(dgate_bias, sums)
        dweight = tiles.plus_product(dweight, dy[rows], product)
        dbias = None if bias is None else tiles.plus(dbias, form.sum_of_rows(dy[rows]))
    sums = (None if t is None else t.to(x.dtype) for t in (dgate, dgate_bias, dweight, dbias))
    return [t for t in (dx, dvalues, *sums) if t is not None]


# y, and the gate before f, which is saved for backward.
_gated_projection = operator(
    "gated_projection(Tensor x, Tensor? values, Tensor gate, Tensor gate_bias, Tensor weight, Tensor? bias, "
    "str activation) -> (Tensor, Tensor)",
    _forward,
    _fake,
    _backward,
)
