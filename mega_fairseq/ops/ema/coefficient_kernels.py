"""Triton kernels of the damped EMA's coefficients and of their gradients.

Coefficients are (directions, N, D), parameters (directions, D, N); other arguments are those of kernels.py.
"""

import triton
import triton.language as tl

from mega_fairseq.ops.ema.kernels import channels, constant, load, store


@triton.jit
def _log1p(z):
    """log(1 + z) for z >= 0; as 2 artanh(z / (2 + z)) near 0."""
    w = z / (z + 2.0)
    series = tl.zeros_like(z)
    for k in tl.static_range(25, 0, -2):
        series = constant(z, 1.0 / k) + series * w * w
    return tl.where(z < 0.5, 2.0 * w * series, tl.log(1.0 + z))


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


@triton.jit(do_not_specialize=["P"])
def add_gradients(sums, log_decay, expand, project, skip, P, M, D, ROWS: tl.constexpr, C: tl.constexpr):
    """Adds `sums` (P, 3 M + 1, D) of P programs: each program adds up one row of D, or a part of it."""
    row, channel = tl.program_id(0), tl.program_id(1) * C + tl.arange(0, C)
    total = tl.zeros([ROWS, C], sums.dtype.element_ty)
    for start in range(0, P, ROWS):
        program = (start + tl.arange(0, ROWS))[:, None]
        at = (program * (3 * M + 1) + row) * D + channel[None, :]
        total += tl.load(sums + at, mask=(program < P) & (channel < D)[None, :], other=0.0)
    totals, kind, at = tl.sum(total, 0), row // M, row % M * D + channel
    tl.store(log_decay + at, totals, mask=channel < tl.where(kind == 0, D, 0))
    tl.store(expand + at, totals, mask=channel < tl.where(kind == 1, D, 0))
    tl.store(project + at, totals, mask=channel < tl.where(kind == 2, D, 0))
    tl.store(skip + channel, totals.to(skip.dtype.element_ty), mask=channel < tl.where(kind == 3, D, 0))
