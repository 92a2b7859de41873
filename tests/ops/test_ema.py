"""All forms of the EMA equal the definition in values and all gradients; states, truncation, padding, cost."""

import math

import pytest
import torch

from mega_fairseq.ops.ema import (
    BLOCK,
    bidirectional_ema,
    ema,
    ema_coefficients,
    ema_fft,
    ema_kernel,
    ema_naive,
    ema_scan,
    ema_window,
    ema_window_step,
    geometric_sum,
    window_taps,
)
from tests.helpers.pretended_device import PretendedDevice, moved
from tests.ops.helpers import Recorder, assert_close, assert_same, kept_for_backward, noise, with_gradients

BATCH, DIM, NDIM = 2, 3, 4
LENGTHS = sorted({1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 37, 101, 3 * BLOCK, 4 * BLOCK + 1})
FORMS = {"scan": ema_scan, "fft": ema_fft, "chosen": ema}


def logits(suffix="", seed=0, **options):
    """alpha, delta, beta, eta of a few channels, some slow and some fast."""
    names = ("alpha", "delta", "beta", "eta")
    drawn = (noise(DIM, NDIM, seed=seed + i, grad=True, **options) for i in range(4))
    return {f"{name}{suffix}": t for name, t in zip(names, drawn)}


def sequence(length, batch=BATCH, seed=10):
    return noise(batch, length, DIM, seed=seed, grad=True)


def definition(x, c, state=None, skip=None):
    y, state = ema_naive(x, c, state)
    return (y if skip is None else y + skip * x), state


def truncated_definition(x, c, truncation, skip):
    """The convolution with the first taps of the kernel, tap by tap."""
    y = skip * x
    for lag in range(min(truncation, x.size(1))):
        tap = (c.project * c.expand * torch.exp(c.log_decay) ** lag).sum(-1)
        y = y + torch.cat([torch.zeros_like(x[:, :lag]), tap * x[:, : x.size(1) - lag]], 1)
    return y


def of(form, **options):
    """A function of x, the four logits, and further arguments of the form."""

    def function(alpha, delta, beta, eta, x, **more):
        return form(x, ema_coefficients(alpha, delta, beta, eta), **more, **options)

    return function


# ------------------------------------------------------------------------------ equality with the definition


@pytest.mark.parametrize("skip", [False, True], ids=["plain", "skip"])
@pytest.mark.parametrize("state", [False, True], ids=["fresh", "carried"])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("form", FORMS)
def test_every_causal_form_equals_the_definition_in_values_and_all_gradients(form, length, state, skip):
    inputs = {**logits(), "x": sequence(length)}
    if state:
        inputs["state"] = noise(BATCH, DIM, NDIM, seed=20, grad=True)
    if skip:
        inputs["skip"] = noise(DIM, seed=21, grad=True)
    assert_same(with_gradients(of(FORMS[form]), inputs), with_gradients(of(definition), inputs))


@pytest.mark.parametrize("length", LENGTHS)
def test_the_bidirectional_form_equals_the_definition_in_both_directions_in_values_and_all_gradients(length):
    def both(form):
        def function(x, skip, **p):
            ahead, back = (ema_coefficients(*(p[f"{n}{d}"] for n in ("alpha", "delta", "beta", "eta"))) for d in "12")
            return form(x, ahead, back, skip)

        return function

    def twice(x, ahead, back, skip):
        return ema_naive(x, ahead)[0] + ema_naive(x.flip(1), back)[0].flip(1) + skip * x

    inputs = {
        **logits("1"),
        **logits("2", seed=5),
        "x": sequence(length),
        "skip": noise(DIM, seed=21, grad=True),
    }
    assert_same(with_gradients(both(bidirectional_ema), inputs), with_gradients(both(twice), inputs))


# ------------------------------------------------------------------------------ truncation


@pytest.mark.parametrize("truncation", [1, 2, 5, 36, 37, 38, 1000])
@pytest.mark.parametrize("length", [1, 2, 37])
@pytest.mark.parametrize("form", ["window", "chosen"])
def test_a_truncated_ema_keeps_the_first_taps_in_values_and_all_gradients(form, length, truncation):
    form = {"window": ema_window, "chosen": ema}[form]
    inputs = {**logits(), "x": sequence(length), "skip": noise(DIM, seed=21, grad=True)}
    ours = with_gradients(of(lambda *a, **k: form(*a, truncation=truncation, **k)[0]), inputs)
    assert_same(ours, with_gradients(of(truncated_definition, truncation=truncation), inputs))


@pytest.mark.parametrize("truncation", [1, 2, 5, 37, 1000])
def test_a_step_of_a_truncated_ema_equals_the_first_of_several_tokens_in_values_and_all_gradients(truncation):
    def with_taps(x, c, state, skip):
        y, state = ema_window_step(x[:, 0], window_taps(c, truncation), state, skip)
        return y.unsqueeze(1), state

    inputs = {
        **logits(),
        "x": sequence(1),
        "state": noise(BATCH, DIM, truncation - 1, seed=20, grad=True),
        "skip": noise(DIM, seed=21, grad=True),
    }
    ours = with_gradients(of(with_taps), inputs)

    # `ema_window` computes two tokens differently from one.
    def first_of_two(x, c, state, skip):
        y, end = ema_window(torch.cat([x, x], 1), c, truncation, state, skip, torch.ones(BATCH, dtype=torch.long))
        return y[:, :1], end

    assert_same(ours, with_gradients(of(first_of_two), inputs))


@torch.no_grad()
def test_a_step_of_a_truncated_ema_computes_no_kernel_and_copies_its_window_once():
    c, truncation = ema_coefficients(**logits()), 1000
    x, state, taps = noise(BATCH, DIM), noise(BATCH, DIM, truncation - 1), window_taps(c, truncation)
    with Recorder() as recorder:
        ema_window_step(x, taps, state, noise(DIM))
    assert recorder.exponentials == 0
    assert recorder.total <= BATCH * DIM * (truncation + 10)
    with Recorder() as control:
        ema(x.unsqueeze(1), c, state, noise(DIM), truncation)
    assert control.exponentials > 0
    assert control.total > BATCH * DIM * 2 * truncation


@torch.no_grad()
def test_the_state_of_a_truncated_ema_does_not_keep_a_long_input_alive():
    _, state = ema(sequence(500), ema_coefficients(**logits()), truncation=5)
    assert state.untyped_storage().nbytes() == state.numel() * state.element_size()


@pytest.mark.parametrize("truncation", [None, 0])
def test_truncation_none_and_zero_keep_all_taps(truncation):
    c, x, skip = ema_coefficients(**logits()), sequence(37), noise(DIM)
    (y, state), (truth, end) = ema(x, c, None, skip, truncation), definition(x, c, None, skip)
    assert_close(y, truth)
    assert_close(state, end)
    both = ema_naive(x, c)[0] + ema_naive(x.flip(1), c)[0].flip(1) + skip * x
    assert_close(bidirectional_ema(x, c, c, skip, truncation), both)


# ------------------------------------------------------------------------------ padding


@pytest.mark.parametrize("truncation", [None, 5])
def test_rows_padded_over_the_end_of_a_block_have_the_values_and_gradients_of_the_rows_alone(truncation):
    lengths, width = torch.tensor([BLOCK + 2, 7]), NDIM if truncation is None else truncation - 1
    inputs = {**logits(), "x": sequence(BLOCK + 2), "state": noise(BATCH, DIM, width, seed=20, grad=True)}

    def padded(x, c, state):
        y, end = ema(x, c, state, None, truncation, lengths)
        return *(row[:length] for row, length in zip(y, lengths)), end

    def alone(x, c, state):
        rows = [ema(x[i : i + 1, :n], c, state[i : i + 1], None, truncation) for i, n in enumerate(lengths)]
        return *(y[0] for y, _ in rows), torch.cat([end for _, end in rows])

    assert_same(with_gradients(of(padded), inputs), with_gradients(of(alone), inputs))


# ------------------------------------------------------------------------------ kernels, cost


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 15, 16, 17, 97, 100, 101])
def test_a_geometric_sum_equals_the_plain_sum_of_powers(length):
    def plain(weight, log_decay):
        powers = torch.exp(log_decay).unsqueeze(-1) ** torch.arange(length)  # (D, N, length)
        return torch.einsum("drn,dnl->drl", weight, powers)

    inputs = {
        "weight": noise(DIM, 2, NDIM, grad=True),
        "log_decay": (-noise(DIM, NDIM, seed=1).abs()).requires_grad_(),
    }
    ours = with_gradients(lambda **i: geometric_sum(**i, length=length), inputs)
    assert_same(ours, with_gradients(plain, inputs))


def recorded(function, *inputs):
    """The Recorder of a forward and a backward pass."""
    with Recorder() as recorder:
        y = function(*inputs)
        y = y[0] if isinstance(y, tuple) else y
        y.sum().backward()
    return recorder


def test_a_kernel_needs_no_table_of_all_powers():
    dim, ndim, length = 8, 16, 4096
    p = [noise(dim, ndim, seed=i, grad=True, dtype=torch.float32) for i in range(4)]
    ours = recorded(lambda *p: ema_kernel(ema_coefficients(*p), length), *p)
    table = dim * ndim * length
    assert ours.largest <= table // 8  # a kernel itself is D x L, 1/16 of the table
    assert 0 < ours.exponentials <= 4 * dim * ndim * math.isqrt(length)

    def textbook(*p):
        c = ema_coefficients(*p)
        powers = torch.exp(c.log_decay.unsqueeze(-1) * torch.arange(length))
        return ((c.expand * c.project).unsqueeze(-1) * powers).sum(1)

    control = recorded(textbook, *p)
    assert control.largest >= table
    assert control.exponentials >= table


@pytest.mark.parametrize("form", ["scan", "fft", "chosen", "truncated", "both directions"])
def test_no_form_creates_a_state_for_every_step(form):
    dim, ndim, length = 4, 16, 4096
    p = [noise(dim, ndim, seed=i, grad=True, dtype=torch.float32) for i in range(4)]
    x = noise(1, length, dim, grad=True, dtype=torch.float32)
    forms = {
        **FORMS,
        "truncated": lambda x, c: ema(x, c, truncation=512),
        "both directions": lambda x, c: bidirectional_ema(x, c, c),
    }
    ours = recorded(lambda x, *p: forms[form](x, ema_coefficients(*p)), x, *p)
    assert ours.largest <= 4 * dim * length  # the spectrum of a padded convolution at most
    assert recorded(lambda x, *p: every_state(x, ema_coefficients(*p)), x, *p).largest >= ndim * dim * length


def every_state(x, c):
    """Expands the input to N states at every step, which no form may do."""
    return (c.expand * x.unsqueeze(-1)).sum(-1)


@pytest.mark.parametrize("form", ["scan", "chosen"])
def test_a_scan_saves_little_more_than_its_input_for_backward(form):
    dim, ndim, length = 4, 16, 16384
    p = [noise(dim, ndim, seed=i, grad=True, dtype=torch.float32) for i in range(4)]
    x = noise(1, length, dim, grad=True, dtype=torch.float32)
    kept = kept_for_backward(lambda: FORMS[form](x, ema_coefficients(*p)))
    assert sum(kept) <= 3 * x.numel()
    steps = kept_for_backward(lambda: ema_naive(x[:, :512], ema_coefficients(*p)))
    assert sum(steps) >= ndim * x[:, :512].numel()


@pytest.mark.parametrize("length", [100, 128, 300], ids=["short block", "one block", "blocks"])
@pytest.mark.parametrize("both", [False, True], ids=["causal", "bidirectional"])
def test_on_a_gpu_the_tables_of_blocks_are_made_again_in_backward(both, length):
    """Each table has D x 128 x 128 entries; values and gradients there are tested with the mixers."""
    p = [noise(DIM, NDIM, seed=i, grad=True) for i in range(4)]
    x = noise(8, length, DIM, grad=True)

    def scan(x, *p):
        c = ema_coefficients(*p)
        return bidirectional_ema(x, c, c) if both else ema(x, c)

    with PretendedDevice():
        there = [moved(t.detach()).requires_grad_() for t in (x, *p)]
        kept = kept_for_backward(lambda: scan(*there))
    assert sum(kept) <= 3 * x.numel()
    assert both or max(kept_for_backward(lambda: scan(x, *p))) >= DIM * min(BLOCK, length) ** 2  # on the CPU


def test_a_scan_on_a_gpu_reads_and_writes_many_times_the_10_bytes_per_element_that_a_kernel_would():
    """docs/performance.md has these numbers, for bfloat16: x and y forward; x and the gradients of both backward."""
    p = [noise(DIM, 16, seed=i, dtype=torch.float32) for i in range(4)]
    x = noise(4, 8192, DIM, dtype=torch.bfloat16)
    with Recorder() as recorder, PretendedDevice():
        x, *p = (moved(t).requires_grad_() for t in (x, *p))
        y, _ = ema(x, ema_coefficients(*p))
        forward = recorder.traffic / x.numel()
        y.backward(y.detach())
    assert forward == pytest.approx(63, rel=0.05)
    assert recorder.traffic / x.numel() - forward == pytest.approx(99, rel=0.05)
