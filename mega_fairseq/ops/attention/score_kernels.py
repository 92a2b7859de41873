"""Scores and weights in Triton kernels, by the formulas of scores.py."""

import triton
import triton.language as tl


@triton.jit
def scored(x, bias, at, inside, count, SCALE: tl.constexpr, SOFTMAX: tl.constexpr, OUTER: tl.constexpr):
    """What f takes, from x = q k `scale` and the bias at these places, for rows that see `count` keys."""
    if not SOFTMAX and not OUTER:
        x = x / (count * tl.full([1], SCALE, x.dtype))
    if bias is not None:
        x += tl.load(bias + at, mask=inside, other=0.0).to(x.dtype)
    if OUTER:
        x = x / tl.sqrt(count)
    return x


@triton.jit
def weight(scores, LAPLACE: tl.constexpr, MEAN: tl.constexpr, STD: tl.constexpr):
    """laplace or relu^2."""
    if LAPLACE:
        mean, width = tl.full([1], MEAN, scores.dtype), tl.full([1], STD * 1.4142135623730951, scores.dtype)
        out = 0.5 * (1.0 + tl.erf((scores - mean) / width))
    else:
        out = tl.maximum(scores, 0.0) * tl.maximum(scores, 0.0)
    return out


@triton.jit
def weight_slope(scores, LAPLACE: tl.constexpr, MEAN: tl.constexpr, STD: tl.constexpr):
    """The derivative of `weight`."""
    if LAPLACE:
        z = (scores - tl.full([1], MEAN, scores.dtype)) / tl.full([1], STD, scores.dtype)
        slope = tl.exp(-0.5 * z * z) * tl.full([1], 1.0 / (STD * 2.5066282746310002), scores.dtype)
    else:
        slope = 2.0 * tl.maximum(scores, 0.0)
    return slope
