"""Triton kernels of the damped and the complex EMA for NVIDIA GPUs: the recurrence, with one thread per channel.

A program computes a segment of T steps of one row for C channels: one warp, whose lanes are the channels, each with its
N states in registers. Tables and states are (..., N, D), so that lanes read neighbouring numbers. Steps after a row's
length are neither read nor computed. Arguments that all kernels share:

    L, D       length of the sequence and number of channels: x is (B, L, D), contiguous
    T, K       steps of a segment, number of segments of a row
    N, PADDED  states of a channel, and the next power of two
    BACK       steps go from the last position to the first
    GRADIENT   x are gradients of outputs, `expand` and `project` are exchanged by the caller, and what is carried from
               step to step has its decay already, as the gradient of the state before has
    COMPLEX    states are complex: first N real parts, then N imaginary parts, (2 N, D)
    log_decay, expand, project   (N, D)
    turns, weight_imag   (N, D) for complex states, or None: the angle of phi in whole turns, in float64; imaginary part
               of `project`, or with GRADIENT of `expand`. Gradients of states are conjugates, which turn like states

h = phi h + x is computed as h + (phi - 1) h + x, which keeps its precision for slow decays. The imaginary parts of real
states are zeros that nothing changes, so that the compiler leaves them out.
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
def load_state(pointer, apart, channel, D, N: tl.constexpr, PADDED: tl.constexpr, COMPLEX: tl.constexpr):
    """The real and imaginary parts of states, which are `apart` in memory."""
    h = load(pointer, channel, D, N, PADDED)
    g = tl.zeros_like(h)
    if COMPLEX:
        g = load(pointer + apart, channel, D, N, PADDED)
    return h, g


@triton.jit
def store_state(pointer, apart, h, g, channel, D, N: tl.constexpr, PADDED: tl.constexpr, COMPLEX: tl.constexpr):
    store(pointer, h, channel, D, N, PADDED)
    if COMPLEX:
        store(pointer + apart, g, channel, D, N, PADDED)


@triton.jit
def load_decay(log_decay, turns, channel, D, N: tl.constexpr, PADDED: tl.constexpr, COMPLEX: tl.constexpr):
    """phi - 1, real and imaginary part."""
    log_phi = load(log_decay, channel, D, N, PADDED)
    minus_1, imag = _expm1(log_phi), tl.zeros_like(log_phi)
    if COMPLEX:
        sine, cosine, half = circle(load(turns, channel, D, N, PADDED), log_phi)
        imag = (1.0 + minus_1) * sine
        minus_1 = minus_1 * cosine - 2.0 * half * half
    return minus_1, imag


@triton.jit
def circle(turns, like):
    """sin(a), cos(a) and sin(a / 2) for angles a in whole turns, in the precision of `like`."""
    angle = ((turns - tl.floor(turns + 0.5)) * constant(turns, 6.283185307179586)).to(like.dtype)
    return tl.sin(angle), tl.cos(angle), tl.sin(0.5 * angle)


@triton.jit
def product(h, g, real, imag, COMPLEX: tl.constexpr):
    """(h + i g) (real + i imag), both without an imaginary part if not COMPLEX."""
    if COMPLEX:
        h, g = h * real - g * imag, g * real + h * imag
    else:
        h *= real
    return h, g


@triton.jit
def step(x, h, g, minus_1, imag, COMPLEX: tl.constexpr):
    """The state after one more step: its product with phi, given as phi - 1, plus x if that is not None."""
    more = minus_1 * h
    if COMPLEX:
        more -= imag * g
        g += minus_1 * g + imag * h
    if x is not None:
        more += x
    return h + more, g


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
    """Loads x of step i, or 0 after the last step.

    Programs load two steps ahead, to hide the latency of memory. They compute steps in pairs, since a copy of a value
    that is still loading waits for it.
    """
    return tl.load(x + start + i * stride, mask=channel < tl.where(i < steps, D, 0), other=0.0)


@triton.jit(do_not_specialize=LENGTHS)
def segment_sums(
    x, lengths, log_decay, turns, expand, weight_imag, sums, L, T, D, K,
    N: tl.constexpr, PADDED: tl.constexpr, C: tl.constexpr, COMPLEX: tl.constexpr,
    BACK: tl.constexpr, GRADIENT: tl.constexpr,
):  # fmt: skip
    """sums (B, K, N, D): what the steps of each segment add to the state after it."""
    row, segment = tl.program_id(0) // K, tl.program_id(0) % K
    channel = channels(C)
    steps = steps_of(lengths, row, segment, L, T)
    at = first(row, segment, steps, channel, L, T, D, BACK)
    minus_1, imag = load_decay(log_decay, turns, channel, D, N, PADDED, COMPLEX)
    h, g = tl.zeros_like(minus_1), tl.zeros_like(minus_1)
    stride = -D if BACK else D
    even, odd = fetched(x, at, 0, steps, stride, channel, D), fetched(x, at, 1, steps, stride, channel, D)
    for i in range(0, steps - 1, 2):
        later_even = fetched(x, at, i + 2, steps, stride, channel, D)
        later_odd = fetched(x, at, i + 3, steps, stride, channel, D)
        h, g = step(even.to(minus_1.dtype)[None, :], h, g, minus_1, imag, COMPLEX)
        h, g = step(odd.to(minus_1.dtype)[None, :], h, g, minus_1, imag, COMPLEX)
        even, odd = later_even, later_odd
    if steps % 2 == 1:
        h, g = step(even.to(minus_1.dtype)[None, :], h, g, minus_1, imag, COMPLEX)
    weight = load(expand, channel, D, N, PADDED)
    if COMPLEX and GRADIENT:
        h, g = product(h, g, weight, load(weight_imag, channel, D, N, PADDED), COMPLEX)
    else:
        h, g = h * weight, g * weight
    if GRADIENT:
        h, g = step(None, h, g, minus_1, imag, COMPLEX)
    M: tl.constexpr = 2 * N if COMPLEX else N
    store_state(sums + tl.program_id(0).to(tl.int64) * M * D, N * D, h, g, channel, D, N, PADDED, COMPLEX)


@triton.jit(do_not_specialize=LENGTHS)
def scan_segments(
    sums, lengths, log_decay, turns, start, before, end, L, T, D, K,
    N: tl.constexpr, PADDED: tl.constexpr, C: tl.constexpr, COMPLEX: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """before (B, K, N, D): what enters each segment, from `start` (B, N, D) on; end (B, N, D): what leaves the last."""
    M: tl.constexpr = 2 * N if COMPLEX else N
    row = tl.program_id(0)
    channel = channels(C)
    log_phi = load(log_decay, channel, D, N, PADDED)
    h, g = tl.zeros_like(log_phi), tl.zeros_like(log_phi)
    if start is not None:
        h, g = load_state(start + row.to(tl.int64) * M * D, N * D, channel, D, N, PADDED, COMPLEX)
    for k in range(K):
        segment = K - 1 - k if BACK else k
        at = (row.to(tl.int64) * K + segment) * M * D
        store_state(before + at, N * D, h, g, channel, D, N, PADDED, COMPLEX)
        steps = steps_of(lengths, row, segment, L, T)
        decay = tl.exp(log_phi * steps)
        if COMPLEX:
            sine, cosine, _ = circle(load(turns, channel, D, N, PADDED) * steps, log_phi)
            h, g = product(h, g, decay * cosine, decay * sine, COMPLEX)
        else:
            # What is left of a large state is small, and must not have the rounding errors of the large one.
            h = tl.where(decay > 0.5, h + _expm1(log_phi * steps) * h, decay * h)
        more, more_imag = load_state(sums + at, N * D, channel, D, N, PADDED, COMPLEX)
        h, g = h + more, g + more_imag
    store_state(end + row.to(tl.int64) * M * D, N * D, h, g, channel, D, N, PADDED, COMPLEX)


@triton.jit
def output(
    x, h, g, minus_1, imag, expand, project, weight_imag, skip, add, y, at, inside,
    COMPLEX: tl.constexpr, GRADIENT: tl.constexpr,
):  # fmt: skip
    """Stores the output of a step, from a decayed state h + i g; returns the state after it, as it is and decayed."""
    new = x.to(minus_1.dtype)
    h += expand * new[None, :]
    if COMPLEX and GRADIENT:
        g += weight_imag * new[None, :]
    out = project * h
    if COMPLEX and not GRADIENT:
        out -= weight_imag * g
    out = tl.sum(out, 0) + skip * new
    if add is not None:
        out += tl.load(add + at, mask=inside, other=0.0)
    tl.store(y + at, out.to(y.dtype.element_ty), mask=inside)
    later, later_imag = step(None, h, g, minus_1, imag, COMPLEX)
    return h, g, later, later_imag


@triton.jit(do_not_specialize=LENGTHS)
def outputs(
    x, lengths, log_decay, turns, expand, project, weight_imag, skip, before, add, y, end, L, T, D, K,
    N: tl.constexpr, PADDED: tl.constexpr, C: tl.constexpr, COMPLEX: tl.constexpr,
    BACK: tl.constexpr, GRADIENT: tl.constexpr,
):  # fmt: skip
    """y (B, L, D), with `add` added, zero after a row's length; end (B, N, D) for rows of a single segment."""
    M: tl.constexpr = 2 * N if COMPLEX else N
    row, segment = tl.program_id(0) // K, tl.program_id(0) % K
    channel = channels(C)
    inside = channel < D
    steps = steps_of(lengths, row, segment, L, T)
    at = first(row, segment, steps, channel, L, T, D, BACK)
    minus_1, imag = load_decay(log_decay, turns, channel, D, N, PADDED, COMPLEX)
    a, b, c = load(expand, channel, D, N, PADDED), load(project, channel, D, N, PADDED), tl.zeros_like(minus_1)
    if COMPLEX:
        c = load(weight_imag, channel, D, N, PADDED)
    omega = tl.zeros_like(tl.sum(minus_1, 0))
    if skip is not None:
        omega = tl.load(skip + channel, mask=inside, other=0.0).to(minus_1.dtype)
    h, g = tl.zeros_like(minus_1), tl.zeros_like(minus_1)
    if before is not None:
        h, g = load_state(before + tl.program_id(0).to(tl.int64) * M * D, N * D, channel, D, N, PADDED, COMPLEX)
    later, later_imag = h, g  # a gradient that enters has its decay already
    if not GRADIENT:
        later, later_imag = step(None, h, g, minus_1, imag, COMPLEX)
    stride = -D if BACK else D
    even, odd = fetched(x, at, 0, steps, stride, channel, D), fetched(x, at, 1, steps, stride, channel, D)
    for i in range(0, steps - 1, 2):
        later_even = fetched(x, at, i + 2, steps, stride, channel, D)
        later_odd = fetched(x, at, i + 3, steps, stride, channel, D)
        h, g, later, later_imag = output(
            even, later, later_imag, minus_1, imag, a, b, c, omega, add, y, at + i * stride, inside, COMPLEX, GRADIENT
        )
        next_at = at + (i + 1) * stride
        h, g, later, later_imag = output(
            odd, later, later_imag, minus_1, imag, a, b, c, omega, add, y, next_at, inside, COMPLEX, GRADIENT
        )
        even, odd = later_even, later_odd
    if steps % 2 == 1:
        last = at + (steps - 1) * stride
        h, g, later, later_imag = output(
            even, later, later_imag, minus_1, imag, a, b, c, omega, add, y, last, inside, COMPLEX, GRADIENT
        )
    if end is not None:
        if GRADIENT:
            h, g = later, later_imag
        store_state(end + row.to(tl.int64) * M * D, N * D, h, g, channel, D, N, PADDED, COMPLEX)
    past = first(row, segment, 0, channel, L, T, D, False)
    for i in range(steps, tl.minimum(T, L - segment * T)):
        tl.store(y + past + i * D, tl.zeros_like(channel).to(y.dtype.element_ty), mask=inside)


@triton.jit
def gradient(
    x, dy, h, g, da, da_imag, db, db_imag, d_eta, d_eta_imag, dy_da, dy_da_imag, dy_db, dy_db_imag, d_omega,
    minus_1, imag, expand, COMPLEX: tl.constexpr,
):  # fmt: skip
    """One step of `coefficient_gradients`; da and db are derivatives of the state by log phi and by `expand`."""
    new, grad = x.to(minus_1.dtype), dy.to(minus_1.dtype)
    if COMPLEX:
        da_imag += g
    da, da_imag = step(None, da + h, da_imag, minus_1, imag, COMPLEX)
    h, g = step(expand * new[None, :], h, g, minus_1, imag, COMPLEX)
    db, db_imag = step(new[None, :], db, db_imag, minus_1, imag, COMPLEX)
    d_eta += grad[None, :] * h
    dy_da += grad[None, :] * da
    dy_db += grad[None, :] * db
    if COMPLEX:
        d_eta_imag += grad[None, :] * g
        dy_da_imag += grad[None, :] * da_imag
        dy_db_imag += grad[None, :] * db_imag
    d_omega += grad * new
    return h, g, da, da_imag, db, db_imag, d_eta, d_eta_imag, dy_da, dy_da_imag, dy_db, dy_db_imag, d_omega


@triton.jit(do_not_specialize=[*LENGTHS, "SEGMENTS"])
def coefficient_gradients(
    x, dy, lengths, log_decay, turns, expand, project, weight_imag, before, after, sums, SEGMENTS, L, T, D, K,
    N: tl.constexpr, PADDED: tl.constexpr, C: tl.constexpr, COMPLEX: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """sums (P, 3 N + 1, D): gradients of log_decay, expand, project and skip, a row of each program.
    COMPLEX: (P, 6 N + 1, D), complex derivatives by log phi and `project`.

    Within a segment, h is followed together with its derivatives by log phi and by `expand`. What they change later is
    known from `after` (B, K, N, D), the gradient of the state after each segment. The third programs divide the states,
    N for each of them: complex ones do not fit into the registers.
    """
    apart, states = tl.num_programs(2) * N * D, tl.program_id(2) * N * D
    M = tl.num_programs(2) * (2 * N if COMPLEX else N)
    channel = channels(C)
    inside = channel < D
    minus_1, imag = load_decay(log_decay + states, turns + states if COMPLEX else None, channel, D, N, PADDED, COMPLEX)
    weight_in, weight_out = load(expand + states, channel, D, N, PADDED), load(project + states, channel, D, N, PADDED)
    zero = tl.zeros_like(minus_1)
    out_imag = load(weight_imag + states, channel, D, N, PADDED) if COMPLEX else zero
    d_log_phi, d_log_phi_imag, d_expand, d_eta, d_eta_imag = zero, zero, zero, zero, zero
    d_omega = tl.sum(zero, 0)
    stride = -D if BACK else D
    for turn in range(tl.cdiv(SEGMENTS - tl.program_id(0), tl.num_programs(0))):
        index = tl.program_id(0) + turn * tl.num_programs(0)
        row, segment = index // K, index % K
        steps = steps_of(lengths, row, segment, L, T)
        at = first(row, segment, steps, channel, L, T, D, BACK)
        own = index.to(tl.int64) * M * D + states
        h, g, da, da_imag, db, db_imag = zero, zero, zero, zero, zero, zero
        if before is not None:
            h, g = load_state(before + own, apart, channel, D, N, PADDED, COMPLEX)
        dy_da, dy_da_imag, dy_db, dy_db_imag = zero, zero, zero, zero
        even, odd = fetched(x, at, 0, steps, stride, channel, D), fetched(x, at, 1, steps, stride, channel, D)
        dy_even, dy_odd = fetched(dy, at, 0, steps, stride, channel, D), fetched(dy, at, 1, steps, stride, channel, D)
        for i in range(0, steps - 1, 2):
            later_even = fetched(x, at, i + 2, steps, stride, channel, D)
            later_dy_even = fetched(dy, at, i + 2, steps, stride, channel, D)
            later_odd = fetched(x, at, i + 3, steps, stride, channel, D)
            later_dy_odd = fetched(dy, at, i + 3, steps, stride, channel, D)
            h, g, da, da_imag, db, db_imag, d_eta, d_eta_imag, dy_da, dy_da_imag, dy_db, dy_db_imag, d_omega = gradient(
                even, dy_even, h, g, da, da_imag, db, db_imag, d_eta, d_eta_imag, dy_da, dy_da_imag, dy_db, dy_db_imag,
                d_omega, minus_1, imag, weight_in, COMPLEX,
            )  # fmt: skip
            h, g, da, da_imag, db, db_imag, d_eta, d_eta_imag, dy_da, dy_da_imag, dy_db, dy_db_imag, d_omega = gradient(
                odd, dy_odd, h, g, da, da_imag, db, db_imag, d_eta, d_eta_imag, dy_da, dy_da_imag, dy_db, dy_db_imag,
                d_omega, minus_1, imag, weight_in, COMPLEX,
            )  # fmt: skip
            even, odd, dy_even, dy_odd = later_even, later_odd, later_dy_even, later_dy_odd
        if steps % 2 == 1:
            h, g, da, da_imag, db, db_imag, d_eta, d_eta_imag, dy_da, dy_da_imag, dy_db, dy_db_imag, d_omega = gradient(
                even, dy_even, h, g, da, da_imag, db, db_imag, d_eta, d_eta_imag, dy_da, dy_da_imag, dy_db, dy_db_imag,
                d_omega, minus_1, imag, weight_in, COMPLEX,
            )  # fmt: skip
        more, more_imag = product(dy_da, dy_da_imag, weight_out, out_imag, COMPLEX)
        d_log_phi, d_log_phi_imag = d_log_phi + more, d_log_phi_imag + more_imag
        more, _ = product(dy_db, dy_db_imag, weight_out, out_imag, COMPLEX)
        d_expand += more
        if after is not None:
            later, later_imag = load_state(
                after + index.to(tl.int64) * M * D + states, apart, channel, D, N, PADDED, COMPLEX
            )
            more, more_imag = product(da, da_imag, later, later_imag, COMPLEX)
            d_log_phi, d_log_phi_imag = d_log_phi + more, d_log_phi_imag + more_imag
            more, _ = product(db, db_imag, later, later_imag, COMPLEX)
            d_expand += more
    out = sums + tl.program_id(0).to(tl.int64) * (3 * M + 1) * D + states
    store_state(out, apart, d_log_phi, d_log_phi_imag, channel, D, N, PADDED, COMPLEX)
    store(out + M * D, d_expand, channel, D, N, PADDED)
    store_state(out + 2 * M * D, apart, d_eta, d_eta_imag, channel, D, N, PADDED, COMPLEX)
    tl.store(out - states + 3 * M * D + channel, d_omega, mask=inside)


# ---------------------------------------------------------------------------------------------- single tokens


@triton.jit(do_not_specialize=["R"])
def token(
    x, state, log_decay, turns, expand, project, skip, y, after, R, D,
    N: tl.constexpr, PADDED: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, SILU: tl.constexpr,
    COMPLEX: tl.constexpr,
):  # fmt: skip
    """y (R, D) and the next state from x (R, D) and a state (R, D, N). Here, tables are (D, N), too.

    If COMPLEX, states and `project` are (..., N, 2).
    """
    channel, n = (tl.program_id(1) * C + tl.arange(0, C)).to(tl.int64), tl.arange(0, PADDED)
    at, exists = channel[:, None] * N + n[None, :], channel < D
    inside = exists[:, None] & (n < N)[None, :]
    wide: tl.constexpr = after.dtype.element_ty
    phi = tl.exp(tl.load(log_decay + at, mask=inside, other=0.0))
    weight_in = tl.load(expand + at, mask=inside, other=0.0)
    PARTS: tl.constexpr = 2 if COMPLEX else 1
    weight_out = tl.load(project + PARTS * at, mask=inside, other=0.0)
    weight_imag, imag = tl.zeros_like(phi), tl.zeros_like(phi)
    if COMPLEX:
        weight_imag = tl.load(project + PARTS * at + 1, mask=inside, other=0.0)
        sine, cosine, _ = circle(tl.load(turns + at, mask=inside, other=0.0), phi)
        phi, imag = phi * cosine, phi * sine
    omega = tl.zeros([C], wide)
    if skip is not None:
        omega = tl.load(skip + channel, mask=exists, other=0.0).to(wide)
    start = tl.program_id(0) * ROWS
    for row in range(start, tl.minimum(start + ROWS, R)):
        here = row * D + channel
        states = PARTS * (here[:, None] * N + n[None, :])
        new = tl.load(x + here, mask=exists, other=0.0).to(wide)
        h, g = tl.load(state + states, mask=inside, other=0.0), tl.zeros_like(phi)
        if COMPLEX:
            g = tl.load(state + states + 1, mask=inside, other=0.0)
        h, g = product(h, g, phi, imag, COMPLEX)
        h += weight_in * new[:, None]
        tl.store(after + states, h, mask=inside)
        if COMPLEX:
            tl.store(after + states + 1, g, mask=inside)
        out, _ = product(h, g, weight_out, weight_imag, COMPLEX)
        out = tl.sum(out, 1) + omega * new
        if SILU:
            out = out * tl.sigmoid(out)
        tl.store(y + here, out.to(y.dtype.element_ty), mask=exists)
