"""Triton kernels of the damped EMA for NVIDIA GPUs: the recurrence itself, with one thread per channel.

A program computes a segment of T steps of one row for C channels: one warp, whose lanes are the channels, each with its
N states in registers. Tables and states are (..., N, D), so that lanes read neighbouring numbers. Steps after a row's
length are neither read nor computed. Arguments that all kernels share:

    L, D       length of the sequence and number of channels: x is (B, L, D), contiguous
    T, K       steps of a segment, number of segments of a row
    N, PADDED  states of a channel, and the next power of two
    BACK       steps go from the last position to the first
    GRADIENT   x are gradients of outputs, `expand` and `project` are exchanged by the caller, and what is carried from
               step to step has its decay already, as the gradient of the state before has
    log_decay, expand, project   (N, D)

h = phi h + x is computed as h + (phi - 1) h + x, which keeps its precision for slow decays.
"""

import triton
import triton.language as tl

LENGTHS = ["L", "T", "K"]  # differ between batches; the compiler would make other kernels for 1 and multiples of 16


@triton.jit
def constant(x, number: tl.constexpr):
    """The number in the precision of x (N, C): older versions of Triton round Python's numbers to float32."""
    return tl.full([1, 1], number, x.dtype)


@triton.jit
def _expm1(z):
    """exp(z) - 1 for z <= 0; by its series near 0, where the difference would lose digits."""
    series = tl.zeros_like(z) + 1.0
    for k in tl.static_range(13, 1, -1):
        series = 1.0 + series * z * constant(z, 1.0 / k)
    return tl.where(z > -0.25, z * series, tl.exp(z) - 1.0)


@triton.jit
def _log1p(z):
    """log(1 + z) for z >= 0; as 2 artanh(z / (2 + z)) near 0."""
    w = z / (z + 2.0)
    series = tl.zeros_like(z)
    for k in tl.static_range(25, 0, -2):
        series = constant(z, 1.0 / k) + series * w * w
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
def segment_sums(
    x, lengths, log_decay, expand, sums, L, T, D, K,
    N: tl.constexpr, PADDED: tl.constexpr, C: tl.constexpr, BACK: tl.constexpr, GRADIENT: tl.constexpr,
):  # fmt: skip
    """sums (B, K, N, D): what the steps of each segment add to the state after it."""
    row, segment = tl.program_id(0) // K, tl.program_id(0) % K
    channel = channels(C)
    steps = steps_of(lengths, row, segment, L, T)
    at = first(row, segment, steps, channel, L, T, D, BACK)
    phi_minus_1 = _expm1(load(log_decay, channel, D, N, PADDED))
    h = tl.zeros_like(phi_minus_1)
    stride = -D if BACK else D
    even, odd = fetched(x, at, 0, steps, stride, channel, D), fetched(x, at, 1, steps, stride, channel, D)
    for i in range(0, steps - 1, 2):
        later_even = fetched(x, at, i + 2, steps, stride, channel, D)
        later_odd = fetched(x, at, i + 3, steps, stride, channel, D)
        h += phi_minus_1 * h + even.to(phi_minus_1.dtype)[None, :]
        h += phi_minus_1 * h + odd.to(phi_minus_1.dtype)[None, :]
        even, odd = later_even, later_odd
    if steps % 2 == 1:
        h += phi_minus_1 * h + even.to(phi_minus_1.dtype)[None, :]
    h *= load(expand, channel, D, N, PADDED)
    if GRADIENT:
        h += phi_minus_1 * h
    store(sums + tl.program_id(0).to(tl.int64) * N * D, h, channel, D, N, PADDED)


@triton.jit(do_not_specialize=LENGTHS)
def scan_segments(
    sums, lengths, log_decay, start, before, end, L, T, D, K,
    N: tl.constexpr, PADDED: tl.constexpr, C: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """before (B, K, N, D): what enters each segment, from `start` (B, N, D) on; end (B, N, D): what leaves the last."""
    row = tl.program_id(0)
    channel = channels(C)
    log_phi = load(log_decay, channel, D, N, PADDED)
    h = tl.zeros_like(log_phi)
    if start is not None:
        h = load(start + row.to(tl.int64) * N * D, channel, D, N, PADDED)
    for k in range(K):
        segment = K - 1 - k if BACK else k
        at = (row.to(tl.int64) * K + segment) * N * D
        store(before + at, h, channel, D, N, PADDED)
        steps = steps_of(lengths, row, segment, L, T)
        decay, decay_minus_1 = tl.exp(log_phi * steps), _expm1(log_phi * steps)
        # What is left of a large state is small, and must not have the rounding errors of the large one.
        h = tl.where(decay > 0.5, h + decay_minus_1 * h, decay * h)
        h += load(sums + at, channel, D, N, PADDED)
    store(end + row.to(tl.int64) * N * D, h, channel, D, N, PADDED)


@triton.jit
def output(x, decayed, phi_minus_1, expand, project, skip, add, y, at, inside):
    """Stores the output of a step; returns the state after it, as it is and decayed."""
    new = x.to(phi_minus_1.dtype)
    h = decayed + expand * new[None, :]
    out = tl.sum(project * h, 0) + skip * new
    if add is not None:
        out += tl.load(add + at, mask=inside, other=0.0)
    tl.store(y + at, out.to(y.dtype.element_ty), mask=inside)
    return h, h + phi_minus_1 * h


@triton.jit(do_not_specialize=LENGTHS)
def outputs(
    x, lengths, log_decay, expand, project, skip, before, add, y, end, L, T, D, K,
    N: tl.constexpr, PADDED: tl.constexpr, C: tl.constexpr, BACK: tl.constexpr, GRADIENT: tl.constexpr,
):  # fmt: skip
    """y (B, L, D), with `add` added, zero after a row's length; end (B, N, D) for rows of a single segment."""
    row, segment = tl.program_id(0) // K, tl.program_id(0) % K
    channel = channels(C)
    inside = channel < D
    steps = steps_of(lengths, row, segment, L, T)
    at = first(row, segment, steps, channel, L, T, D, BACK)
    phi_minus_1 = _expm1(load(log_decay, channel, D, N, PADDED))
    weight_in, weight_out = load(expand, channel, D, N, PADDED), load(project, channel, D, N, PADDED)
    omega = tl.zeros_like(tl.sum(phi_minus_1, 0))
    if skip is not None:
        omega = tl.load(skip + channel, mask=inside, other=0.0)
    h = tl.zeros_like(phi_minus_1)
    if before is not None:
        h = load(before + tl.program_id(0).to(tl.int64) * N * D, channel, D, N, PADDED)
    decayed = h  # a gradient that enters has its decay already
    if not GRADIENT:
        decayed += phi_minus_1 * h
    stride = -D if BACK else D
    even, odd = fetched(x, at, 0, steps, stride, channel, D), fetched(x, at, 1, steps, stride, channel, D)
    for i in range(0, steps - 1, 2):
        later_even = fetched(x, at, i + 2, steps, stride, channel, D)
        later_odd = fetched(x, at, i + 3, steps, stride, channel, D)
        h, decayed = output(even, decayed, phi_minus_1, weight_in, weight_out, omega, add, y, at + i * stride, inside)
        next_at = at + (i + 1) * stride
        h, decayed = output(odd, decayed, phi_minus_1, weight_in, weight_out, omega, add, y, next_at, inside)
        even, odd = later_even, later_odd
    if steps % 2 == 1:
        last = at + (steps - 1) * stride
        h, decayed = output(even, decayed, phi_minus_1, weight_in, weight_out, omega, add, y, last, inside)
    if end is not None:
        store(end + row.to(tl.int64) * N * D, decayed if GRADIENT else h, channel, D, N, PADDED)
    past = first(row, segment, 0, channel, L, T, D, False)
    for i in range(steps, tl.minimum(T, L - segment * T)):
        tl.store(y + past + i * D, tl.zeros_like(channel).to(y.dtype.element_ty), mask=inside)


@triton.jit
def gradient(x, dy, h, dh_da, dh_db, d_eta, dy_da, dy_db, d_omega, phi_minus_1, expand):
    """One step of `coefficient_gradients`, with a = log phi and b = `expand`."""
    new, grad = x.to(phi_minus_1.dtype), dy.to(phi_minus_1.dtype)
    dh_da += h
    dh_da += phi_minus_1 * dh_da
    h += phi_minus_1 * h + expand * new[None, :]
    dh_db += phi_minus_1 * dh_db + new[None, :]
    d_eta += grad[None, :] * h
    dy_da += grad[None, :] * dh_da
    dy_db += grad[None, :] * dh_db
    return h, dh_da, dh_db, d_eta, dy_da, dy_db, d_omega + grad * new


@triton.jit(do_not_specialize=[*LENGTHS, "SEGMENTS"])
def coefficient_gradients(
    x, dy, lengths, log_decay, expand, project, before, after, dtables, dskip, SEGMENTS, L, T, D, K,
    N: tl.constexpr, PADDED: tl.constexpr, C: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """dtables (parts, 3, N, D): gradients of log_decay, expand and project, a part for every so many segments;
    dskip (parts, D).

    Within a segment, h is followed together with its derivatives by a = log phi and by b = `expand`. What they change
    later is known from `after` (B, K, N, D), the gradient of the state after each segment.
    """
    channel = channels(C)
    inside = channel < D
    phi_minus_1 = _expm1(load(log_decay, channel, D, N, PADDED))
    weight_in, weight_out = load(expand, channel, D, N, PADDED), load(project, channel, D, N, PADDED)
    d_log_phi, d_expand, d_eta = tl.zeros_like(phi_minus_1), tl.zeros_like(phi_minus_1), tl.zeros_like(phi_minus_1)
    d_omega = tl.sum(d_log_phi, 0)
    stride = -D if BACK else D
    for turn in range(tl.cdiv(SEGMENTS - tl.program_id(0), tl.num_programs(0))):
        part = tl.program_id(0) + turn * tl.num_programs(0)
        row, segment = part // K, part % K
        steps = steps_of(lengths, row, segment, L, T)
        at = first(row, segment, steps, channel, L, T, D, BACK)
        h, dh_da, dh_db = tl.zeros_like(phi_minus_1), tl.zeros_like(phi_minus_1), tl.zeros_like(phi_minus_1)
        if before is not None:
            h = load(before + part.to(tl.int64) * N * D, channel, D, N, PADDED)
        dy_da, dy_db = tl.zeros_like(phi_minus_1), tl.zeros_like(phi_minus_1)
        even, odd = fetched(x, at, 0, steps, stride, channel, D), fetched(x, at, 1, steps, stride, channel, D)
        dy_even, dy_odd = fetched(dy, at, 0, steps, stride, channel, D), fetched(dy, at, 1, steps, stride, channel, D)
        for i in range(0, steps - 1, 2):
            later_even = fetched(x, at, i + 2, steps, stride, channel, D)
            later_dy_even = fetched(dy, at, i + 2, steps, stride, channel, D)
            later_odd = fetched(x, at, i + 3, steps, stride, channel, D)
            later_dy_odd = fetched(dy, at, i + 3, steps, stride, channel, D)
            h, dh_da, dh_db, d_eta, dy_da, dy_db, d_omega = gradient(
                even, dy_even, h, dh_da, dh_db, d_eta, dy_da, dy_db, d_omega, phi_minus_1, weight_in
            )
            h, dh_da, dh_db, d_eta, dy_da, dy_db, d_omega = gradient(
                odd, dy_odd, h, dh_da, dh_db, d_eta, dy_da, dy_db, d_omega, phi_minus_1, weight_in
            )
            even, odd, dy_even, dy_odd = later_even, later_odd, later_dy_even, later_dy_odd
        if steps % 2 == 1:
            h, dh_da, dh_db, d_eta, dy_da, dy_db, d_omega = gradient(
                even, dy_even, h, dh_da, dh_db, d_eta, dy_da, dy_db, d_omega, phi_minus_1, weight_in
            )
        d_log_phi += weight_out * dy_da
        d_expand += weight_out * dy_db
        if after is not None:
            later = load(after + part.to(tl.int64) * N * D, channel, D, N, PADDED)
            d_log_phi += later * dh_da
            d_expand += later * dh_db
    out = dtables + tl.program_id(0).to(tl.int64) * 3 * N * D
    store(out, d_log_phi, channel, D, N, PADDED)
    store(out + N * D, d_expand, channel, D, N, PADDED)
    store(out + 2 * N * D, d_eta, channel, D, N, PADDED)
    tl.store(dskip + tl.program_id(0) * D + channel, d_omega, mask=inside)


# ---------------------------------------------------------------------------------------------- single tokens


@triton.jit(do_not_specialize=["R"])
def token(
    x, state, log_decay, expand, project, skip, y, after, R, D,
    N: tl.constexpr, PADDED: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """y (R, D) and the next state from x (R, D) and a state (R, D, N). Here, tables are (D, N), too."""
    channel, n = (tl.program_id(1) * C + tl.arange(0, C)).to(tl.int64), tl.arange(0, PADDED)
    at, exists = channel[:, None] * N + n[None, :], channel < D
    inside = exists[:, None] & (n < N)[None, :]
    wide: tl.constexpr = after.dtype.element_ty
    phi = tl.exp(tl.load(log_decay + at, mask=inside, other=0.0))
    weight_in = tl.load(expand + at, mask=inside, other=0.0)
    weight_out = tl.load(project + at, mask=inside, other=0.0)
    omega = tl.zeros([C], wide)
    if skip is not None:
        omega = tl.load(skip + channel, mask=exists, other=0.0)
    start = tl.program_id(0) * ROWS
    for row in range(start, tl.minimum(start + ROWS, R)):
        here = row * D + channel
        states = here[:, None] * N + n[None, :]
        new = tl.load(x + here, mask=exists, other=0.0).to(wide)
        h = tl.load(state + states, mask=inside, other=0.0)
        h = phi * h + weight_in * new[:, None]
        tl.store(after + states, h, mask=inside)
        out = tl.sum(weight_out * h, 1) + omega * new
        if SILU:
            out = out * tl.sigmoid(out)
        tl.store(y + here, out.to(y.dtype.element_ty), mask=exists)


# ---------------------------------------------------------------------------------------------- coefficients


@triton.jit
def logits_at(channel, D, N: tl.constexpr, PADDED: tl.constexpr):
    """Where a parameter (directions, D, N) has this program's direction as (N, C), and which of it exists."""
    n = tl.arange(0, PADDED)[:, None]
    return (tl.program_id(0) * D + channel[None, :]) * N + n, (n < N) & (channel[None, :] < D)


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
    alpha, delta, beta, eta, log_decay, expand, project, D,
    N: tl.constexpr, PADDED: tl.constexpr, C: tl.constexpr, SCALE: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """log_decay, expand and project (directions, N, D), as in `ema_coefficients_naive`."""
    channel = channels(C)
    wide: tl.constexpr = log_decay.dtype.element_ty
    at, inside = logits_at(channel, D, N, PADDED)
    alphas, deltas = tl.load(alpha + at, inside, 0.0).to(wide), tl.load(delta + at, inside, 0.0).to(wide)
    a, b, s = odds(alphas, deltas, LARGEST)
    first = tl.program_id(0) * N * D
    store(log_decay + first, -_log1p(1.0 / s), channel, D, N, PADDED)
    weight = tl.load(beta + at, inside, 0.0).to(wide) / (1.0 + tl.exp(-alphas))
    store(expand + first, weight, channel, D, N, PADDED)
    store(project + first, tl.load(eta + at, inside, 0.0).to(wide) * constant(weight, SCALE), channel, D, N, PADDED)


@triton.jit
def coefficients_backward(
    alpha, delta, beta, d_log_phi, d_expand, d_project, d_alpha, d_delta, d_beta, d_eta, D,
    N: tl.constexpr, PADDED: tl.constexpr, C: tl.constexpr, SCALE: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """From the gradients of the coefficients, those of the parameters (directions, D, N)."""
    channel = channels(C)
    wide: tl.constexpr = d_log_phi.dtype.element_ty
    at, inside = logits_at(channel, D, N, PADDED)
    alphas, deltas = tl.load(alpha + at, inside, 0.0).to(wide), tl.load(delta + at, inside, 0.0).to(wide)
    a, b, s = odds(alphas, deltas, LARGEST)
    first = tl.program_id(0) * N * D
    d_s = load(d_log_phi + first, channel, D, N, PADDED) / (s * (1.0 + s))  # d log phi / d S
    d_weight = load(d_expand + first, channel, D, N, PADDED)
    weight = 1.0 / (1.0 + tl.exp(-alphas))
    of_alpha = tl.where(tl.abs(alphas) <= LARGEST, -d_s * a * (1.0 + b), 0.0)
    of_alpha += d_weight * tl.load(beta + at, inside, 0.0).to(wide) * weight * (1.0 - weight)
    of_delta = tl.where(tl.abs(deltas) <= LARGEST, -d_s * b * (1.0 + a), 0.0)
    tl.store(d_alpha + at, of_alpha.to(d_alpha.dtype.element_ty), inside)
    tl.store(d_delta + at, of_delta.to(d_delta.dtype.element_ty), inside)
    tl.store(d_beta + at, (d_weight * weight).to(d_beta.dtype.element_ty), inside)
    of_eta = load(d_project + first, channel, D, N, PADDED) * constant(weight, SCALE)
    tl.store(d_eta + at, of_eta.to(d_eta.dtype.element_ty), inside)
