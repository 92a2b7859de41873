"""The timestep norm by one Triton kernel forward and one backward, for NVIDIA GPUs.

Each program goes through the tokens of one sequence for one group of W channels, STEPS at a time, and carries sums from
tile to tile. The formulas are those of __init__.py, with the mean before the piece as s.
"""

from typing import Any, List, Optional, Tuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mega_fairseq.ops.backend import launch
from mega_fairseq.ops.precision import at_least_float32
from mega_fairseq.ops.rows import WIDE, add_both_sums
from mega_fairseq.ops.timestep_norm.sums import fake

TILE = 4096  # numbers that a program holds at once


@triton.jit
def begin(mean, var, count, lengths, L):
    """The place of this program's statistics, these before the piece, and the number of its real tokens."""
    row = tl.program_id(0) + tl.arange(0, 1)
    here, end = row * tl.num_programs(1) + tl.program_id(1), tl.zeros([1], tl.int32) + L
    if lengths is not None:
        end = tl.load(lengths + row).to(tl.int32)
    return here, tl.load(mean + here), tl.load(var + here), tl.load(count + row).to(tl.float64), end


@triton.jit
def load(x, t, end, L, W: tl.constexpr, WIDE: tl.constexpr):
    """Numbers of tokens t, zeros unless 0 <= t < end, their places in x, and the places of the tokens' statistics."""
    row = (tl.program_id(0).to(tl.int64) * L + t) * tl.num_programs(1) + tl.program_id(1)
    at = row[:, None] * W + tl.arange(0, W)[None, :]
    return tl.load(x + at, mask=((t >= 0) & (t < end))[:, None], other=0.0).to(WIDE), at, row


@triton.jit
def centred(x, W: tl.constexpr):
    """x (STEPS, W) without the means m of tokens, and these."""
    mean = tl.sum(x, 1) / W
    return x - mean[:, None], mean.to(tl.float64)


@triton.jit
def forward_kernel(
    x, weight, bias, mean, var, count, lengths, y, means, scales, end_mean, end_var, L,
    EPS: tl.constexpr, STEPS: tl.constexpr, W: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    here, origin, before, n, end = begin(mean, var, count, lengths, L)
    channel = (tl.program_id(1) * W + tl.arange(0, W))[None, :]
    sum_distances, sum_squares = tl.zeros([1], tl.float64), n * before
    for start in range(0, L, STEPS):
        t = start + tl.arange(0, STEPS)
        numbers, at, row = load(x, t, end, L, W, WIDE)
        deviations, own = centred(numbers, W)
        distances = tl.where(t < end, own - origin, 0.0)
        squares = (tl.sum(deviations * deviations, 1) / W).to(tl.float64) + distances * distances
        k = n + t + 1
        drift = (sum_distances + tl.cumsum(distances, 0)) / k
        spread = tl.maximum((sum_squares + tl.cumsum(squares, 0)) / k - drift * drift, 0.0)
        scale = 1.0 / tl.sqrt(spread.to(WIDE) + tl.full([1], EPS, WIDE))
        out = (deviations + (distances - drift).to(WIDE)[:, None]) * scale[:, None]
        if weight is not None:
            out = out * (1.0 + tl.load(weight + channel).to(WIDE)) + tl.load(bias + channel).to(WIDE)
        tl.store(y + at, tl.where((t < end)[:, None], out, 0.0).to(y.dtype.element_ty), mask=(t < L)[:, None])
        tl.store(means + row, origin + drift, mask=t < L)
        tl.store(scales + row, scale, mask=t < L)
        sum_distances += tl.sum(distances, 0)
        sum_squares += tl.sum(squares, 0)
    k = tl.maximum(n + end, 1.0)
    drift = sum_distances / k
    tl.store(end_mean + here, origin + drift)
    tl.store(end_var + here, tl.where(end > 0, tl.maximum(sum_squares / k - drift * drift, 0.0), before))


@triton.jit
def backward_kernel(
    x, weight, mean, var, count, lengths, means, scales, dy, dend_mean, dend_var, dx, dmean, dvar, sums, L,
    STEPS: tl.constexpr, W: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The gradients of x and of the state, and this sequence's part of those of weight and bias: sums (B, 2 D)."""
    here, origin, before, n, end = begin(mean, var, count, lengths, L)
    last_mean, last_var = tl.zeros([1], tl.float64), tl.zeros([1], tl.float64)
    if dend_mean is not None:
        last_mean = tl.load(dend_mean + here)
    if dend_var is not None:
        last_var = tl.load(dend_var + here)
    channel = (tl.program_id(1) * W + tl.arange(0, W))[None, :]
    of_mean, of_var, of_both = tl.zeros([1], tl.float64), tl.zeros([1], tl.float64), tl.zeros([1], tl.float64)
    of_weight, of_bias = tl.zeros([1, W], WIDE), tl.zeros([1, W], WIDE)
    for turn in range(tl.cdiv(L, STEPS)):
        t = L - 1 - turn * STEPS - tl.arange(0, STEPS)  # backwards
        real = (t >= 0) & (t < end)
        numbers, at, row = load(x, t, end, L, W, WIDE)
        g, _, _ = load(dy, t, end, L, W, WIDE)
        deviations, own = centred(numbers, W)
        current, scale = tl.load(means + row, mask=real, other=0.0), tl.load(scales + row, mask=real, other=0.0)
        shift = (own - current).to(WIDE)
        of_weight += tl.sum(g * (deviations + shift[:, None]) * scale[:, None], 0)[None, :]
        of_bias += tl.sum(g, 0)[None, :]
        if weight is not None:
            g *= 1.0 + tl.load(weight + channel).to(WIDE)
        total, r, k = tl.sum(g, 1), scale.to(tl.float64), tl.where(real, n + t + 1, 1.0)
        g_mean = tl.where(t == end - 1, last_mean, 0.0) - r * total
        g_var = tl.where(t == end - 1, last_var, 0.0) - 0.5 * r * r * r * (tl.sum(g * deviations, 1) + shift * total)
        g_mean, g_var = tl.where(real, g_mean / k, 0.0), tl.where(real, g_var / k, 0.0)
        g_both = g_var * (current - origin)
        later_var = of_var + tl.cumsum(g_var, 0)
        later = of_mean + tl.cumsum(g_mean, 0) + 2.0 * ((own - origin) * later_var - of_both - tl.cumsum(g_both, 0))
        out = g * scale[:, None] + (later / W).to(WIDE)[:, None] + deviations * (2.0 * later_var / W).to(WIDE)[:, None]
        tl.store(dx + at, tl.where(real[:, None], out, 0.0).to(dx.dtype.element_ty), mask=(t >= 0)[:, None])
        of_mean += tl.sum(g_mean, 0)
        of_var += tl.sum(g_var, 0)
        of_both += tl.sum(g_both, 0)
    tl.store(dmean + here, tl.where(end > 0, n * (of_mean - 2.0 * of_both), last_mean))
    tl.store(dvar + here, tl.where(end > 0, n * of_var, last_var))
    own = sums + tl.program_id(0).to(tl.int64) * 2 * W * tl.num_programs(1) + channel
    tl.store(own, of_weight)
    tl.store(own + W * tl.num_programs(1), of_bias)


def _launch(kernel: Any, x: Tensor, groups: int, *args: Any, **options: Any) -> None:
    width = x.size(2) // groups
    sizes = {"STEPS": TILE // width, "W": width, "WIDE": WIDE[at_least_float32(x.dtype)]}
    launch(kernel, (x.size(0), groups), x, *args, x.size(1), **options, **sizes, num_warps=8)


def forward(x: Tensor, *args: Any) -> Tuple[Tensor, ...]:
    """As in sums.py."""
    outputs, (*tensors, eps) = fake(x, *args), args
    tensors = [None if t is None else t.contiguous() for t in tensors]
    _launch(forward_kernel, x.contiguous(), tensors[2].size(1), *tensors, *outputs, EPS=eps)
    return outputs


def backward(grads: List[Optional[Tensor]], saved: List[Tensor], x: Tensor, *args: Any) -> List[Tensor]:
    """As in sums.py."""
    tensors = args[:-1]  # without eps
    x, (weight, _, *state) = x.contiguous(), [None if t is None else t.contiguous() for t in tensors]
    dy, dmean, dvar = (None if t is None else t.contiguous() for t in (grads[0], *grads[3:]))
    dy, outputs = torch.zeros_like(x) if dy is None else dy, [torch.empty_like(t) for t in (x, *state[:2])]
    sums = saved[1].new_empty(x.size(0), 2 * x.size(2))
    _launch(backward_kernel, x, state[0].size(1), weight, *state, *saved, dy, dmean, dvar, *outputs, sums)
    dx, *of_state = outputs
    parameters = [] if weight is None else add_both_sums(sums, weight.dtype, x.size(2), x.size(2))
    return [dx, *parameters, *of_state]
