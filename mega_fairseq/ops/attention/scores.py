"""Weights f(scores) and products that all forms of attention share."""

import math
from typing import Optional, Tuple, Union

import torch
from torch import Tensor

ATTENTION_FUNCTIONS = ("softmax", "relu2", "laplace")
LAPLACE_MEAN, LAPLACE_STD = 0.707107, 0.282095  # the released constants: sqrt(1/2) and sqrt(1/(4 pi)) to six digits

MASKED = -1e30  # finite, so that a row without any key has no NaN in its gradient


def relu2(x: Tensor) -> Tensor:
    """relu(x)^2 (eq. 16, Primer)."""
    return torch.relu(x).square()


def laplace(x: Tensor) -> Tensor:
    """0.5 (1 + erf((x - mu) / (sigma sqrt 2))) (eq. 17): relu2 with bounded value and slope."""
    return 0.5 * (1.0 + torch.erf((x - LAPLACE_MEAN) / (LAPLACE_STD * math.sqrt(2.0))))


def weights_of(scores: Tensor, function: str) -> Tensor:
    if function == "softmax":
        return torch.softmax(scores, -1)
    return relu2(scores) if function == "relu2" else laplace(scores)


def weights_backward(grad: Tensor, scores: Tensor, weights: Tensor, function: str) -> Tensor:
    """The gradient of the scores, from that of the weights, which may be overwritten."""
    if function == "softmax":
        return torch.ops.aten._softmax_backward_data(grad, weights, -1, weights.dtype)
    if function == "relu2":
        return grad.mul_(torch.relu(scores)).mul_(2.0)
    slope = ((scores - LAPLACE_MEAN) / LAPLACE_STD).square_().mul_(-0.5).exp_()
    return grad.mul_(slope.mul_(1.0 / (LAPLACE_STD * math.sqrt(2.0 * math.pi))))


Factor = Union[float, Tensor, None]


def row_factors(function: str, outer: bool, scale: float, seen: Union[int, Tensor]) -> Tuple[Factor, Factor]:
    """The factors of q k^T `scale` and of its sum with the bias, for rows that see `seen` keys; None for 1.

    Not for softmax, which has none.
    """
    return (None, seen**-0.5) if outer and function == "relu2" else (1.0 / (scale * seen), None)


def add_bias(
    scores: Tensor, function: str, seen: Union[int, Tensor, None], bias: Optional[Tensor], outer: bool, scale: float
) -> Factor:
    """Makes scores q k^T `scale` (G, n, m) those that f takes, in place, and returns the last factor of their rows.

    Rows see `seen` keys, which softmax ignores. The bias is a matrix for all groups, or one per head (H, n, m).
    """
    before, after = (None, None) if function == "softmax" else row_factors(function, outer, scale, seen)
    if before is not None:
        scores.mul_(before)
    if bias is not None:
        by_head(scores, bias).add_(bias)
    if after is not None:
        scores.mul_(after)
    return after


def by_head(x: Tensor, matrices: Tensor) -> Tensor:
    """x (G, n, m) as (G / H, H, n, m) if there is a matrix for each of H heads, (H, n, m)."""
    return x if matrices.dim() < 3 else x.unflatten(0, (-1, matrices.size(0)))


def weigh(
    scores: Tensor,
    function: str,
    hidden: Optional[Tensor],
    bias: Optional[Tensor],
    multiplier: Optional[Tensor],
    outer: bool,
    scale: float,
) -> Tensor:
    """The weights of scores q k^T `scale` (G, n, m), in their dtype; the scores are overwritten.

    `hidden` is bool, True for keys that a row does not see. bias and multiplier are matrices, one for all groups or one
    per head (H, n, m). Each may have one row for all queries.
    """
    seen = scores.size(-1)
    if hidden is not None and function != "softmax":
        seen = (seen - hidden.sum(-1, keepdim=True, dtype=scores.dtype)).clamp_min_(1)
    add_bias(scores, function, seen, bias, outer, scale)
    if hidden is None:
        weights = weights_of(scores, function)
    else:  # a row without any key gives zeros
        weights = weights_of(scores.masked_fill(hidden, MASKED), function).masked_fill(hidden, 0.0)
    return weights if multiplier is None else (by_head(weights, multiplier) * multiplier).reshape(weights.shape)


# ------------------------------------------------------------------------------------------- products in half precision


def scaled_rows(x: Tensor, dtype: torch.dtype) -> Tuple[Tensor, Optional[Tensor]]:
    """x (G, n, m) in `dtype`; for float16, with rows divided by float32 numbers (G, n, 1), which are also returned.

    Rows with an L1 norm of 1 neither underflow nor give products that overflow.
    """
    if dtype != torch.float16:
        return x.to(dtype), None
    size = torch.linalg.vector_norm(x, 1, -1, keepdim=True).clamp_min_(torch.finfo(x.dtype).tiny)
    return (x / size).to(dtype), size


def product(a: Tensor, b: Tensor) -> Tensor:
    """a (G, n, m), in float32 or better, times b (G, m, e), multiplied in b's dtype; for float16, in float32."""
    if a.dtype == b.dtype:
        return torch.bmm(a, b)
    rows, size = scaled_rows(a, b.dtype)
    out = torch.bmm(rows, b)
    return out if size is None else out * size


def multiply(a: Tensor, b: Tensor, out: Tensor, add: bool = False, scale: float = 1.0) -> None:
    """Writes `product(a, b)` times `scale` to `out`, or adds it."""
    if a.dtype == b.dtype == out.dtype:
        out.baddbmm_(a, b, beta=float(add), alpha=scale)
    elif add:
        out.add_(product(a, b), alpha=scale)
    else:
        torch.mul(product(a, b), scale, out=out)


def weighted_sum(weights: Tensor, v: Tensor) -> Tensor:
    """weights (G, n, m), in float32 or better, times v (G, m, e) -> (G, n, e) in v's dtype."""
    return product(weights, v).to(v.dtype)
