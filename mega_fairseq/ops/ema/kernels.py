"""Triton kernels of the damped EMA for NVIDIA GPUs: the recurrence itself, with one thread per channel.

A program computes a segment of T steps of one row for C channels: one warp, whose lanes are the channels, each with its
N states in registers. Tables and states are (..., N, D), so that lanes read neighbouring numbers. Steps after a row's
length are neither read nor computed. Arguments that all kernels share:

    L, D       length of the sequence and number of channels: x is (B, L, D), contiguous
    T, K       steps of a segment, number of segments of a row
    N, PADDED  states of a channel, and the next power of two
    BACK       steps go from the last position to the first
    GRADIENT   x are gradients of outputs: `expand` and `project` are exchanged, and what is carried from step to step
               has its decay already, as the gradient of the state before has
    tables     (3, N, D): log_decay, expand and project

h = phi h + x is computed as h + less h + x with less = phi - 1, which keeps its precision for slow decays.
"""

import triton
import triton.language as tl

LENGTHS = ["L", "T", "K"]  # differ between batches; the compiler would make other kernels for 1 and multiples of 16


@triton.jit
def _expm1(z):
    """exp(z) - 1 for z <= 0; by its series near 0, where the difference would lose digits."""
    series = tl.zeros_like(z) + 1.0
    for k in tl.static_range(13, 1, -1):
        series = 1.0 + series * z * (1.0 / k)
    return tl.where(z > -0.3, z * series, tl.exp(z) - 1.0)


@triton.jit
def _log1p(z):
    """log(1 + z) for z >= 0; as 2 artanh(z / (2 + z)) near 0."""
    w = z / (z + 2.0)
    series = tl.zeros_like(z)
    for k in tl.static_range(25, 0, -2):
        series = 1.0 / k + series * w * w
    return tl.where(z < 0.5, 2.0 * w * series, tl.log(1.0 + z))


@triton.jit
def channels(C: tl.constexpr):
    """The channels of this program. The hint keeps the compiler from giving several to one lane, with fewer states."""
    return tl.multiple_of(tl.program_id(1) * C + tl.arange(0, C), 1)


@triton.jit
def load(pointer, channel, D, N: tl.constexpr, PADDED: tl.constexpr):
    """A table (N, D) at these channels; padded states are 0."""
    n = tl.arange(0, PADDED)[:, None]
    return tl.load(pointer + n * D + channel[None, :], mask=(n < N) & (channel[None, :] < D), other=0.0)


@triton.jit
def store(pointer, values, channel, D, N: tl.constexpr, PADDED: tl.constexpr):
    n = tl.arange(0, PADDED)[:, None]
    tl.store(pointer + n * D + channel[None, :], values, mask=(n < N) & (channel[None, :] < D))


@triton.jit
def steps_of(lengths, row, segment, L, T):
    """How many steps of a segment are within the row."""
    length = L
    if lengths is not None:
        length = tl.minimum(tl.load(lengths + row), L).to(tl.int32)
    return tl.minimum(tl.maximum(length - segment * T, 0), T)


@triton.jit
def first(row, segment, steps, channel, L, T, D, BACK: tl.constexpr):
    """Where the first step of a segment is in (B, L, D)."""
    position = segment * T
    if BACK:
        position += tl.maximum(steps - 1, 0)
    return (row.to(tl.int64) * L + position) * D + channel


@triton.jit
def fetched(x, start, i, steps, stride, channel, D):
    """x of step i, or 0 after the last one.

    Programs ask for it two steps early, since memory takes that long. They compute steps in pairs, because even to
    rename a value that is on its way would wait for it.
    """
    return tl.load(x + start + i * stride, mask=channel < tl.where(i < steps, D, 0), other=0.0)


@triton.jit(do_not_specialize=LENGTHS)
def sums(
    x, lengths, tables, found, L, T, D, K,
    N: tl.constexpr, PADDED: tl.constexpr, C: tl.constexpr, BACK: tl.constexpr, GRADIENT: tl.constexpr,
):  # fmt: skip
    """found (B, K, N, D): what the steps of each segment add to the state after it."""
    row, segment = tl.program_id(0) // K, tl.program_id(0) % K
    channel = channels(C)
    steps = steps_of(lengths, row, segment, L, T)
    at = first(row, segment, steps, channel, L, T, D, BACK)
    less = _expm1(load(tables, channel, D, N, PADDED))
    h = tl.zeros_like(less)
    stride = -D if BACK else D
    even, odd = fetched(x, at, 0, steps, stride, channel, D), fetched(x, at, 1, steps, stride, channel, D)
    for i in range(0, steps - 1, 2):
        later_even = fetched(x, at, i + 2, steps, stride, channel, D)
        later_odd = fetched(x, at, i + 3, steps, stride, channel, D)
        h += less * h + even.to(less.dtype)[None, :]
        h += less * h + odd.to(less.dtype)[None, :]
        even, odd = later_even, later_odd
    if steps % 2 == 1:
        h += less * h + even.to(less.dtype)[None, :]
    h *= load(tables + (2 if GRADIENT else 1) * N * D, channel, D, N, PADDED)
    if GRADIENT:
        h += less * h
    store(found + tl.program_id(0).to(tl.int64) * N * D, h, channel, D, N, PADDED)


@triton.jit(do_not_specialize=LENGTHS)
def scan(
    sums, lengths, tables, start, before, end, L, T, D, K,
    N: tl.constexpr, PADDED: tl.constexpr, C: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """before (B, K, N, D): what enters each segment, from `start` (B, N, D) on; end (B, N, D): what leaves the last."""
    row = tl.program_id(0)
    channel = channels(C)
    log_decay = load(tables, channel, D, N, PADDED)
    less_of_segment, rest_of_segment = _expm1(log_decay * T), tl.exp(log_decay * T)
    h = tl.zeros_like(log_decay)
    if start is not None:
        h = load(start + row.to(tl.int64) * N * D, channel, D, N, PADDED)
    for k in range(K):
        segment = K - 1 - k if BACK else k
        at = (row.to(tl.int64) * K + segment) * N * D
        store(before + at, h, channel, D, N, PADDED)
        steps = steps_of(lengths, row, segment, L, T)
        less, rest = less_of_segment, rest_of_segment
        if steps < T:
            less, rest = _expm1(log_decay * steps), tl.exp(log_decay * steps)
        # What is left of a large state is small, and must not have the rounding errors of the large one.
        h = tl.where(less > -0.5, h + less * h, rest * h)
        h += load(sums + at, channel, D, N, PADDED)
    store(end + row.to(tl.int64) * N * D, h, channel, D, N, PADDED)


@triton.jit
def output(x, decayed, less, expand, project, skip, add, y, at, inside):
    """Stores the output of a step; returns the state after it, as it is and decayed."""
    new = x.to(less.dtype)
    h = decayed + expand * new[None, :]
    out = tl.sum(project * h, 0) + skip * new
    if add is not None:
        out += tl.load(add + at, mask=inside, other=0.0)
    tl.store(y + at, out.to(y.dtype.element_ty), mask=inside)
    return h, h + less * h


@triton.jit(do_not_specialize=LENGTHS)
def outputs(
    x, lengths, tables, skip, before, add, y, end, L, T, D, K,
    N: tl.constexpr, PADDED: tl.constexpr, C: tl.constexpr, BACK: tl.constexpr, GRADIENT: tl.constexpr,
):  # fmt: skip
    """y (B, L, D), with `add` added, zero after a row's length; end (B, N, D) for rows of a single segment."""
    row, segment = tl.program_id(0) // K, tl.program_id(0) % K
    channel = channels(C)
    inside = channel < D
    steps = steps_of(lengths, row, segment, L, T)
    at = first(row, segment, steps, channel, L, T, D, BACK)
    less = _expm1(load(tables, channel, D, N, PADDED))
    expand = load(tables + (2 if GRADIENT else 1) * N * D, channel, D, N, PADDED)
    project = load(tables + (1 if GRADIENT else 2) * N * D, channel, D, N, PADDED)
    direct = tl.zeros_like(tl.sum(less, 0))
    if skip is not None:
        direct = tl.load(skip + channel, mask=inside, other=0.0)
    h = tl.zeros_like(less)
    if before is not None:
        h = load(before + tl.program_id(0).to(tl.int64) * N * D, channel, D, N, PADDED)
    decayed = h  # a gradient that enters has its decay already
    if not GRADIENT:
        decayed += less * h
    stride = -D if BACK else D
    even, odd = fetched(x, at, 0, steps, stride, channel, D), fetched(x, at, 1, steps, stride, channel, D)
    for i in range(0, steps - 1, 2):
        later_even = fetched(x, at, i + 2, steps, stride, channel, D)
        later_odd = fetched(x, at, i + 3, steps, stride, channel, D)
        h, decayed = output(even, decayed, less, expand, project, direct, add, y, at + i * stride, inside)
        h, decayed = output(odd, decayed, less, expand, project, direct, add, y, at + (i + 1) * stride, inside)
        even, odd = later_even, later_odd
    if steps % 2 == 1:
        last = at + (steps - 1) * stride
        h, decayed = output(even, decayed, less, expand, project, direct, add, y, last, inside)
    if end is not None:
        store(end + row.to(tl.int64) * N * D, decayed if GRADIENT else h, channel, D, N, PADDED)
    past = first(row, segment, 0, channel, L, T, D, False)
    for i in range(steps, tl.minimum(T, L - segment * T)):
        tl.store(y + past + i * D, tl.zeros_like(channel).to(y.dtype.element_ty), mask=inside)


@triton.jit
def gradient(x, dy, h, by_decay, by_expand, of_project, sum_decay, sum_expand, direct, less, expand):
    """One step of `gradients`."""
    new, given = x.to(less.dtype), dy.to(less.dtype)
    by_decay += h
    by_decay += less * by_decay
    h += less * h + expand * new[None, :]
    by_expand += less * by_expand + new[None, :]
    of_project += given[None, :] * h
    sum_decay += given[None, :] * by_decay
    sum_expand += given[None, :] * by_expand
    return h, by_decay, by_expand, of_project, sum_decay, sum_expand, direct + given * new


@triton.jit(do_not_specialize=[*LENGTHS, "SEGMENTS"])
def gradients(
    x, dy, lengths, tables, before, after, found, of_skip, SEGMENTS, L, T, D, K,
    N: tl.constexpr, PADDED: tl.constexpr, C: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """found (parts, 3, N, D): the gradients of tables, each part of every so many segments; of_skip (parts, D).

    Within a segment, h is followed together with its derivatives by log phi and by `expand`. What they change later is
    known from `after` (B, K, N, D), the gradient of the state after each segment.
    """
    channel = channels(C)
    inside = channel < D
    less = _expm1(load(tables, channel, D, N, PADDED))
    expand, project = load(tables + N * D, channel, D, N, PADDED), load(tables + 2 * N * D, channel, D, N, PADDED)
    of_decay, of_expand, of_project = tl.zeros_like(less), tl.zeros_like(less), tl.zeros_like(less)
    direct = tl.sum(of_decay, 0)
    stride = -D if BACK else D
    for turn in range(tl.cdiv(SEGMENTS - tl.program_id(0), tl.num_programs(0))):
        part = tl.program_id(0) + turn * tl.num_programs(0)
        row, segment = part // K, part % K
        steps = steps_of(lengths, row, segment, L, T)
        at = first(row, segment, steps, channel, L, T, D, BACK)
        h, by_decay, by_expand = tl.zeros_like(less), tl.zeros_like(less), tl.zeros_like(less)
        if before is not None:
            h = load(before + part.to(tl.int64) * N * D, channel, D, N, PADDED)
        sum_decay, sum_expand = tl.zeros_like(less), tl.zeros_like(less)
        even, odd = fetched(x, at, 0, steps, stride, channel, D), fetched(x, at, 1, steps, stride, channel, D)
        dy_even, dy_odd = fetched(dy, at, 0, steps, stride, channel, D), fetched(dy, at, 1, steps, stride, channel, D)
        for i in range(0, steps - 1, 2):
            later_even = fetched(x, at, i + 2, steps, stride, channel, D)
            later_dy_even = fetched(dy, at, i + 2, steps, stride, channel, D)
            later_odd = fetched(x, at, i + 3, steps, stride, channel, D)
            later_dy_odd = fetched(dy, at, i + 3, steps, stride, channel, D)
            h, by_decay, by_expand, of_project, sum_decay, sum_expand, direct = gradient(
                even, dy_even, h, by_decay, by_expand, of_project, sum_decay, sum_expand, direct, less, expand
            )
            h, by_decay, by_expand, of_project, sum_decay, sum_expand, direct = gradient(
                odd, dy_odd, h, by_decay, by_expand, of_project, sum_decay, sum_expand, direct, less, expand
            )
            even, odd, dy_even, dy_odd = later_even, later_odd, later_dy_even, later_dy_odd
        if steps % 2 == 1:
            h, by_decay, by_expand, of_project, sum_decay, sum_expand, direct = gradient(
                even, dy_even, h, by_decay, by_expand, of_project, sum_decay, sum_expand, direct, less, expand
            )
        of_decay += project * sum_decay
        of_expand += project * sum_expand
        if after is not None:
            later = load(after + part.to(tl.int64) * N * D, channel, D, N, PADDED)
            of_decay += later * by_decay
            of_expand += later * by_expand
    out = found + tl.program_id(0).to(tl.int64) * 3 * N * D
    store(out, of_decay, channel, D, N, PADDED)
    store(out + N * D, of_expand, channel, D, N, PADDED)
    store(out + 2 * N * D, of_project, channel, D, N, PADDED)
    tl.store(of_skip + tl.program_id(0) * D + channel, direct, mask=inside)


# ---------------------------------------------------------------------------------------------- coefficients


@triton.jit
def logit(pointer, channel, D, N: tl.constexpr, PADDED: tl.constexpr, wide: tl.constexpr):
    """A parameter (directions, D, N) of this program's direction as (N, C)."""
    n = tl.arange(0, PADDED)[:, None]
    at = (tl.program_id(0) * D + channel[None, :]) * N + n
    return tl.load(pointer + at, mask=(n < N) & (channel[None, :] < D), other=0.0).to(wide)


@triton.jit
def bounded(x, LARGEST: tl.constexpr):
    """x between -LARGEST and LARGEST; NaN remains NaN, for which a GPU's minimum would take the other number."""
    return tl.where(x == x, tl.minimum(tl.maximum(x, -LARGEST), LARGEST), x)


@triton.jit
def odds(alpha, delta, LARGEST: tl.constexpr):
    """A = exp(-alpha) and B = exp(-delta), of bounded logits, and S = A + B + A B: phi = S / (1 + S)."""
    a, b = tl.exp(-bounded(alpha, LARGEST)), tl.exp(-bounded(delta, LARGEST))
    return a, b, a + b + a * b


@triton.jit
def coefficients(
    alpha, delta, beta, eta, tables, D,
    N: tl.constexpr, PADDED: tl.constexpr, C: tl.constexpr, SCALE: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """tables (directions, 3, N, D) of `ema_coefficients`."""
    channel = channels(C)
    wide: tl.constexpr = tables.dtype.element_ty
    of_alpha, of_delta = logit(alpha, channel, D, N, PADDED, wide), logit(delta, channel, D, N, PADDED, wide)
    a, b, s = odds(of_alpha, of_delta, LARGEST)
    out = tables + tl.program_id(0) * 3 * N * D
    store(out, -_log1p(1.0 / s), channel, D, N, PADDED)
    store(out + N * D, logit(beta, channel, D, N, PADDED, wide) / (1.0 + tl.exp(-of_alpha)), channel, D, N, PADDED)
    store(out + 2 * N * D, logit(eta, channel, D, N, PADDED, wide) * SCALE, channel, D, N, PADDED)


@triton.jit
def coefficients_backward(
    alpha, delta, beta, given, found, D,
    N: tl.constexpr, PADDED: tl.constexpr, C: tl.constexpr, SCALE: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """From the gradients `given` (directions, 3, N, D) of tables: found (directions, 4, N, D), those of the logits."""
    channel = channels(C)
    wide: tl.constexpr = given.dtype.element_ty
    of_alpha, of_delta = logit(alpha, channel, D, N, PADDED, wide), logit(delta, channel, D, N, PADDED, wide)
    a, b, s = odds(of_alpha, of_delta, LARGEST)
    at = given + tl.program_id(0) * 3 * N * D
    by_s = load(at, channel, D, N, PADDED) / (s * (1.0 + s))  # d log phi / d S
    by_expand = load(at + N * D, channel, D, N, PADDED)
    weight = 1.0 / (1.0 + tl.exp(-of_alpha))
    by_alpha = tl.where(tl.abs(of_alpha) <= LARGEST, -by_s * a * (1.0 + b), 0.0)
    by_alpha += by_expand * logit(beta, channel, D, N, PADDED, wide) * weight * (1.0 - weight)
    out = found + tl.program_id(0) * 4 * N * D
    store(out, by_alpha, channel, D, N, PADDED)
    by_delta = tl.where(tl.abs(of_delta) <= LARGEST, -by_s * b * (1.0 + a), 0.0)
    store(out + N * D, by_delta, channel, D, N, PADDED)
    store(out + 2 * N * D, by_expand * weight, channel, D, N, PADDED)
    store(out + 3 * N * D, load(at + 2 * N * D, channel, D, N, PADDED) * SCALE, channel, D, N, PADDED)
