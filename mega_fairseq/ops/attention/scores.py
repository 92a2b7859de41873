"""Scores, weights and products that all forms of attention share."""

import math
from typing import Optional, Tuple, Union

import torch
from torch import Tensor

from mega_fairseq.ops.precision import at_least_float32

ATTENTION_FUNCTIONS = ("softmax", "relu2", "laplace")
LAPLACE_MEAN, LAPLACE_STD = 0.707107, 0.282095  # the released constants: sqrt(1/2) and sqrt(1/(4 pi)) to six digits

MASKED = -1e30  # finite, so that a row without any key has no NaN in its gradient


def relu2(x: Tensor) -> Tensor:
    """relu(x)^2 (eq. 16, Primer)."""
    return torch.relu(x).square()


def laplace(x: Tensor) -> Tensor:
    """0.5 (1 + erf((x - mu) / (sigma sqrt 2))) (eq. 17): relu2 with bounded value and slope."""
    return 0.5 * (1.0 + torch.erf((x - LAPLACE_MEAN) / (LAPLACE_STD * math.sqrt(2.0))))


def _laplace_slope(x: Tensor) -> Tensor:
    slope = ((x - LAPLACE_MEAN) / LAPLACE_STD).square_().mul_(-0.5).exp_()
    return slope.mul_(1.0 / (LAPLACE_STD * math.sqrt(2.0 * math.pi)))


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
    return grad.mul_(_laplace_slope(scores))


# ------------------------------------------------------------------------------------------------- 1 / tau


def one_over_tau(
    q: Tensor, k: Tensor, function: str, causal: bool, key_padding: Optional[Tensor], outer: bool = False
) -> Union[float, Tensor]:
    """The factor of q; tau is sqrt(z) for softmax and an outer scale, else the number of keys that each row sees."""
    if function == "softmax" or (outer and function == "relu2"):
        return q.size(-1) ** -0.5
    return one_over_keys(q, k, causal, key_padding)


def one_over_keys(q: Tensor, k: Tensor, causal: bool, key_padding: Optional[Tensor]) -> Union[float, Tensor]:
    """1 / the number of keys that each row sees: (n, 1), (G, n, 1) or (G, 1, 1), or one number for all rows."""
    queries, keys = q.size(1), k.size(1)
    if causal:
        seen = torch.arange(keys - queries + 1, keys + 1, device=q.device)
        if key_padding is not None:
            real = (~key_padding).cumsum(-1)[:, keys - queries :]  # (G, n)
            seen = real.clamp_min(1)
    elif key_padding is not None:
        seen = (~key_padding).sum(-1, keepdim=True).clamp_min(1)  # (G, 1)
    else:
        return 1.0 / keys
    return seen.to(at_least_float32(q.dtype)).reciprocal().unsqueeze(-1)


def scaled_queries(q: Tensor, factor: Union[float, Tensor], apart: bool = True) -> Tuple[Tensor, Optional[Tensor]]:
    """q times `factor`; in half precision, q times a part of the factor, and the rest of it in float32.

    The rest, (G, n, 1), multiplies the scores. Divided by thousands of keys, queries would underflow in float16;
    products with 1 / tau would be rounded in bfloat16. With `apart=False` there is no rest.
    """
    if q.dtype == at_least_float32(q.dtype):
        return q * factor, None
    if not apart:
        return (q * factor).to(q.dtype), None
    # About 1 / sqrt(z), so that scores fit into float16; a power of 2, so that the product is exact.
    part = 2.0 ** -round(math.log2(q.size(-1)) / 2)
    return q * part, _factor(factor / part, q).expand(q.size(0), q.size(1), 1)


def outer_factor(
    q: Tensor, k: Tensor, function: str, outer: bool, causal: bool, key_padding: Optional[Tensor]
) -> Optional[Tensor]:
    """The factor of scores and bias that divides relu2's weights by the number of keys: (G, n, 1)."""
    if not outer or function != "relu2":
        return None
    factor = _factor(one_over_keys(q, k, causal, key_padding), q)
    return factor.sqrt().expand(q.size(0), q.size(1), 1)


def _factor(factor: Union[float, Tensor], q: Tensor) -> Tensor:
    """A tensor in float32 or better on q's device; a number is filled in there, as the host would wait for a copy."""
    dtype = at_least_float32(q.dtype)
    return factor.to(dtype) if isinstance(factor, Tensor) else q.new_full((1, 1, 1), factor, dtype=dtype)


# ------------------------------------------------------------------------------------------- padding and the future


def visible_keys(q: Tensor, k: Tensor, causal: bool, key_padding: Optional[Tensor]) -> Optional[Tensor]:
    """The keys that each query may see: (n, m), (G, 1, m) or (G, n, m) bool, or None for all."""
    queries, keys = q.size(1), k.size(1)
    visible = None
    if causal:
        visible = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
    if key_padding is not None:
        real = ~key_padding.unsqueeze(1)
        visible = real if visible is None else visible & real
    return visible


# ------------------------------------------------------------------------------------------- products in half precision


def scaled_rows(x: Tensor, dtype: torch.dtype) -> Tuple[Tensor, Optional[Tensor]]:
    """x (G, n, m) in `dtype`; for float16, with rows divided by float32 numbers (G, n, 1), which are also returned.

    Rows with an L1 norm of 1 neither underflow nor give products that overflow.
    """
    if dtype != torch.float16:
        return x.to(dtype), None
    size = torch.linalg.vector_norm(x, 1, -1, keepdim=True).clamp_min_(torch.finfo(x.dtype).tiny)
    return (x / size).to(dtype), size


def weighted_sum(weights: Tensor, v: Tensor) -> Tensor:
    """weights (G, n, m), in float32 or better, times v (G, m, e) -> (G, n, e) in v's dtype."""
    if v.dtype == weights.dtype:
        return torch.bmm(weights, v)
    rows, size = scaled_rows(weights, v.dtype)
    out = torch.bmm(rows, v)
    return out if size is None else (out * size).to(v.dtype)
