"""Products of Toeplitz matrices, one for each head, with sequences: the token mixing of gMLP.

    y_i = rows_h(i) sum_j weight_h(j - i) keys_h(j) v_j + bias_h(i)

Shapes: v (G, m, H w) -> (G, n, H w). A group is a chunk of a sequence, and head h has the h-th block of w channels.
As in `attention`, weight is (H, n + m - 1), with weight[:, j - i + n - 1] for output i and token j, and the last output
is at the place of the last token. rows and bias are (H, n), keys (H, m). `causal` leaves out later tokens.

The fast form multiplies blocks of rows of a head's matrix, which all groups share, with the head's channels in place.
Nothing of size n x m outlives its block; backward computes the blocks again.
"""

from typing import Iterator, List, NamedTuple, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mega_fairseq.ops.attention.scores import scaled_rows
from mega_fairseq.ops.backend import on_cpu
from mega_fairseq.ops.diagonals import diagonal_sums, toeplitz_matrix
from mega_fairseq.ops.operators import operator
from mega_fairseq.ops.precision import at_least_float32, cast_dtype, product_dtype, without_autocast

BLOCK_ROWS = 128  # of a matrix, on the CPU: fewer rows leave out more of the future, more rows multiply faster


def toeplitz_naive(
    v: Tensor,
    weight: Tensor,
    rows: Optional[Tensor] = None,
    keys: Optional[Tensor] = None,
    bias: Optional[Tensor] = None,
    causal: bool = False,
) -> Tensor:
    """`toeplitz` with whole matrices and autograd: the definition."""
    heads, m = weight.size(0), v.size(1)
    n = weight.size(1) - m + 1
    matrix = toeplitz_matrix(weight.to(at_least_float32(weight.dtype)), n, m)  # (H, n, m)
    if causal:
        matrix = matrix.tril(m - n)
    if rows is not None:
        matrix = matrix * rows.unsqueeze(-1)
    if keys is not None:
        matrix = matrix * keys.unsqueeze(-2)
    y = torch.einsum("hnm,gmhw->gnhw", matrix.to(v.dtype), v.unflatten(-1, (heads, -1)))
    return (y if bias is None else y + bias.t().unsqueeze(-1).to(y.dtype)).flatten(2)


def toeplitz(
    v: Tensor,
    weight: Tensor,
    rows: Optional[Tensor] = None,
    keys: Optional[Tensor] = None,
    bias: Optional[Tensor] = None,
    causal: bool = False,
) -> Tensor:
    """v (G, m, H w) -> (G, n, H w), block by block."""
    dtype = cast_dtype(v)
    v = v.to(product_dtype(v, dtype))
    with without_autocast(v):
        if causal:  # the weights of later keys have no effect and no gradient
            queries = weight.size(1) - v.size(1) + 1
            weight = F.pad(weight[:, : v.size(1)], (0, queries - 1))
        return _toeplitz(v, weight, rows, keys, bias, causal).to(dtype)


# ------------------------------------------------------------------------------------------- blocks


class _Block(NamedTuple):
    head: int
    channels: slice
    rows: slice
    keys: slice
    distances: slice  # of weight


class _Matrices(NamedTuple):
    """What a head's matrix is made of; the optional parts as in `toeplitz`."""

    weight: Tensor
    rows: Optional[Tensor]
    keys: Optional[Tensor]

    def block(self, b: _Block) -> Tensor:
        """(r, k) in float32 or better."""
        weight = self.weight[b.head, b.distances].to(at_least_float32(self.weight.dtype))
        matrix = toeplitz_matrix(weight, b.rows.stop - b.rows.start, b.keys.stop)
        for factor in self.factors(b):
            matrix = matrix if factor is None else matrix * factor
        return matrix

    def factors(self, b: _Block) -> Tuple[Optional[Tensor], Optional[Tensor]]:
        rows, keys = self.rows, self.keys
        rows = None if rows is None else rows[b.head, b.rows].unsqueeze(1)
        return rows, None if keys is None else keys[b.head, b.keys]


def _blocks(v: Tensor, weight: Tensor, causal: bool) -> Iterator[_Block]:
    """Blocks that cover all matrices, the last rows of a head first, which have all its keys."""
    heads, m = weight.size(0), v.size(1)
    n, width = weight.size(1) - m + 1, v.size(2) // heads
    size = min(n, BLOCK_ROWS) if on_cpu(v) else n
    for head in range(heads):
        for stop in range(n, 0, -size):
            start, seen = max(0, stop - size), m - n + stop if causal else m
            distances = slice(n - stop, n - start + seen - 1)
            yield _Block(head, slice(head * width, (head + 1) * width), slice(start, stop), slice(0, seen), distances)


def _forward(v, weight, rows, keys, bias, causal) -> Tensor:
    matrices = _Matrices(weight, rows, keys)
    y = _fake(v, weight)
    for b in _blocks(v, weight, causal):
        out = y[:, b.rows, b.channels]
        _multiply(matrices.block(b), v[:, b.keys, b.channels], out)
        if bias is not None:
            out += bias[b.head, b.rows].unsqueeze(1).to(out.dtype)
    return y


def _fake(v: Tensor, weight: Tensor, *_) -> Tensor:
    return v.new_empty(v.size(0), weight.size(1) - v.size(1) + 1, v.size(2))


def _backward(grads, _, v, weight, rows, keys, bias, causal) -> List[Tensor]:
    (dy,), matrices, inputs = grads, _Matrices(weight, rows, keys), (weight, rows, keys, bias)
    dv = torch.empty_like(v, dtype=at_least_float32(v.dtype))
    sums = [None if t is None else torch.zeros_like(t, dtype=at_least_float32(t.dtype)) for t in inputs]
    dweight, drows, dkeys, dbias = sums
    for b in _blocks(v, weight, causal):
        grad = dy[:, b.rows, b.channels]  # (G, r, w)
        first = b.rows.stop == dy.size(1)  # block of a head, which initialises the sums over its blocks
        if first:
            values = _channels_together(v[:, :, b.channels])  # (m, G w)
        _multiply(matrices.block(b).t(), grad, dv[:, b.keys, b.channels], add=not first)
        dmatrix = torch.mm(_channels_together(grad), values[b.keys].t()).to(dweight.dtype)  # (r, k)
        _add_gradients(matrices, b, dmatrix, dweight, drows, dkeys)
        if dbias is not None:
            dbias[b.head, b.rows] += grad.sum((0, 2), dtype=dbias.dtype)
    return [dv.to(v.dtype), *(s.to(t.dtype) for t, s in zip(inputs, sums) if t is not None)]


# Autograd would keep the matrices of all heads and the sums of dv by blocks.
_toeplitz = operator(
    "toeplitz(Tensor v, Tensor weight, Tensor? rows, Tensor? keys, Tensor? bias, bool causal) -> Tensor",
    _forward,
    _fake,
    _backward,
)


def _add_gradients(matrices: _Matrices, b: _Block, dmatrix, dweight, drows, dkeys) -> None:
    """Adds the gradients of weight, rows and keys, from that of a block of their product."""
    rows, keys = matrices.factors(b)
    by_rows = dmatrix if rows is None else dmatrix * rows
    dweight[b.head, b.distances] += diagonal_sums(by_rows if keys is None else by_rows * keys)
    if rows is None and keys is None:
        return
    plain = _Matrices(matrices.weight, None, None).block(b)
    if drows is not None:
        drows[b.head, b.rows] += (dmatrix * plain if keys is None else dmatrix * plain * keys).sum(1)
    if dkeys is not None:
        dkeys[b.head, b.keys] += (by_rows * plain).sum(0)


# ------------------------------------------------------------------------------------------- products


def _multiply(matrix: Tensor, x: Tensor, out: Tensor, add: bool = False) -> None:
    """matrix (r, k) times each x (G, k, w), into a part of a tensor (G, r, w), or added to it."""
    rows, size = scaled_rows(matrix, x.dtype)
    rows = rows.expand(x.size(0), -1, -1)
    if size is None and out.dtype == x.dtype:
        out.baddbmm_(rows, x) if add else torch.bmm(rows, x, out=out)
        return
    product = torch.bmm(rows, x)
    product = product if size is None else product * size
    out.add_(product) if add else out.copy_(product)


def _channels_together(x: Tensor) -> Tensor:
    """(G, k, w) -> (k, G w), for sums over all groups; float16 becomes float32, since they could overflow."""
    x = x.transpose(0, 1).flatten(1)
    return x.float() if x.dtype == torch.float16 else x
