"""All forms of the EMA equal the definition in values and all gradients; states, truncation, padding, cost."""

import pytest
import torch

from mega_fairseq.ops import block_scan
from mega_fairseq.ops.block_scan import BLOCK, state_after
from mega_fairseq.ops.ema import ema, ema_coefficients, ema_naive, ema_token, window_taps
from mega_fairseq.ops.ema.naive import ema_kernel_naive
from mega_fairseq.ops.ema.windows import ema_kernel
from tests.ops.helpers import Recorder, assert_same, kept_for_backward, noise, with_gradients

BATCH, DIM, NDIM = 2, 3, 4
LENGTHS = [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 4 * BLOCK + 1]
TAPS = [0, 1, 2, 5, 36, 37, 38, 1000]  # 0 keeps all
directions = pytest.mark.parametrize("directions", [1, 2], ids=["causal", "bidirectional"])


def logits(directions=1, dim=DIM, ndim=NDIM, **options):
    """alpha, delta, beta, eta of a few channels, some slow and some fast."""
    names = ("alpha", "delta", "beta", "eta")
    options = {"grad": True, **options}
    return {name: noise(directions, dim, ndim, seed=i, **options) for i, name in enumerate(names)}


def inputs(length, directions=1, truncation=None, state=False, skip=False, lengths=False):
    tensors = {**logits(directions), "x": noise(BATCH, length, DIM, seed=10, grad=True)}
    if state:
        width = truncation - 1 if truncation else NDIM
        tensors["state"] = noise(BATCH, DIM, width, seed=20, grad=True)
    if skip:
        tensors["skip"] = noise(DIM, seed=21, grad=True)
    if lengths:
        tensors["lengths"] = torch.tensor([length - length // 3, 0])
    return tensors


def of(form, **options):
    """A function of the four logits, x, and further arguments of the form, that returns a tuple of tensors."""

    def function(alpha, delta, beta, eta, x, **more):
        results = form(x, ema_coefficients(alpha, delta, beta, eta), **more, **options)
        return tuple(t for t in results if t is not None)

    return function


def assert_equals_the_definition(tensors, **options):
    assert_same(with_gradients(of(ema, **options), tensors), with_gradients(of(ema_naive, **options), tensors))


# ------------------------------------------------------------------------------ equality with the definition


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"state": True, "skip": True},
        {"lengths": True},
        {"state": True, "skip": True, "lengths": True},
        {"directions": 2, "skip": True},
        {"directions": 2, "lengths": True},
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("length", LENGTHS)
def test_blocks_equal_the_definition(length, options):
    assert_equals_the_definition(inputs(length, **options))


@pytest.mark.parametrize("truncation", TAPS)
@pytest.mark.parametrize("length", [1, 37, BLOCK + 1])
@directions
def test_truncated_blocks_equal_the_definition(directions, length, truncation):
    assert_equals_the_definition(inputs(length, directions, skip=True), truncation=truncation)


@pytest.mark.parametrize("lengths", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("truncation", [1, 5, 37])
@pytest.mark.parametrize("length", [1, 30, BLOCK + 2])
def test_truncated_states_equal_the_definition(length, truncation, lengths):
    assert_equals_the_definition(inputs(length, 1, truncation, True, True, lengths), truncation=truncation)


def test_a_slice_is_reduced_to_the_state_that_it_leaves():
    for length in LENGTHS:
        tensors = inputs(length)
        ours = with_gradients(of(lambda x, c: (state_after(x, c),)), tensors)
        assert_same(ours, with_gradients(of(lambda x, c: ema_naive(x, c)[1:]), tensors))


@pytest.mark.parametrize("truncation", [None, 1, 5])
def test_a_token_with_prepared_taps_equals_the_definition(truncation):
    def token(x, c, state, skip):
        taps = window_taps(c, truncation) if truncation else None
        y, state = ema_token(x[:, 0], c, state, skip, taps)
        return y.unsqueeze(1), state

    tensors = inputs(1, 1, truncation, state=True, skip=True)
    assert_same(with_gradients(of(token), tensors), with_gradients(of(ema_naive, truncation=truncation), tensors))


def test_a_block_scan_on_other_devices_equals_that_on_the_cpu(monkeypatch):
    """There it takes log2 K steps instead of K."""
    truth = with_gradients(of(ema), inputs(5 * BLOCK + 3, state=True))
    truth_both = with_gradients(of(ema), inputs(5 * BLOCK + 3, 2))
    monkeypatch.setattr(block_scan, "_one_after_the_other", block_scan._by_doubling)
    assert_same(with_gradients(of(ema), inputs(5 * BLOCK + 3, state=True)), truth)
    assert_same(with_gradients(of(ema), inputs(5 * BLOCK + 3, 2)), truth_both)


def test_the_operator_of_blocks_passes_the_checks_of_torch():
    """Shapes of fake tensors, gradients when traced, no aliases."""
    x, state, within = (noise(*shape, grad=True) for shape in ((BATCH, 6, DIM), (BATCH, DIM, NDIM), (DIM, 3, 3)))
    tables = [noise(*s, seed=i, grad=True) for i, s in enumerate(((DIM, 3, NDIM), (DIM, NDIM, 3), (1, DIM, NDIM)))]
    torch.library.opcheck(block_scan.block_scan, (x, state, within, *tables))
    torch.library.opcheck(block_scan.block_scan, (x[:, :3], None, within, None, None, None))


# ------------------------------------------------------------------------------ kernels, cost


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 127, 128, 129, 4 * 64 + 1])
def test_a_kernel_equals_its_definition(length):
    def of_logits(form):
        return lambda **p: form(ema_coefficients(**p), length)

    assert_same(
        with_gradients(of_logits(ema_kernel), logits(2)), with_gradients(of_logits(ema_kernel_naive), logits(2))
    )


def recorded(function):
    """The Recorder of a forward and a backward pass."""
    with Recorder() as recorder:
        y = function()
        (y[0] if isinstance(y, tuple) else y).sum().backward()
    return recorder


@torch.no_grad()
def test_a_token_of_a_truncated_ema_computes_no_kernel_and_copies_its_window_once():
    c, truncation = ema_coefficients(**logits()), 1000
    x, state, taps = noise(BATCH, DIM), noise(BATCH, DIM, truncation - 1), window_taps(c, truncation)
    with Recorder() as recorder:
        ema_token(x, c, state, noise(DIM), taps)
    assert recorder.exponentials == 0
    assert recorder.total <= BATCH * DIM * (truncation + 10)


@pytest.mark.parametrize("truncation", [None, 512])
@directions
def test_no_form_creates_a_state_for_every_step(directions, truncation):
    dim, ndim, length = 4, 16, 4096
    p, x = logits(directions, dim, ndim, dtype=torch.float32), noise(1, length, dim, grad=True, dtype=torch.float32)
    assert recorded(lambda: ema(x, ema_coefficients(**p), truncation=truncation)).largest <= 4 * dim * length
    assert recorded(lambda: every_state(x, ema_coefficients(**p))).largest >= ndim * dim * length


def every_state(x, c):
    """Expands the input to N states at every step, which no form may do."""
    return (c.expand[0] * x.unsqueeze(-1)).sum(-1)


def test_blocks_save_little_more_than_their_input_for_backward():
    dim, ndim, length = 4, 16, 16384
    p, x = logits(1, dim, ndim, dtype=torch.float32), noise(1, length, dim, grad=True, dtype=torch.float32)
    assert sum(kept_for_backward(lambda: ema(x, ema_coefficients(**p)))) <= 3 * x.numel()
    steps = kept_for_backward(lambda: ema_naive(x[:, :512], ema_coefficients(**p)))
    assert sum(steps) >= ndim * x[:, :512].numel()


def test_coefficients_of_any_precision_are_at_least_float32():
    for dtype, wide in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        c = ema_coefficients(**logits(dtype=dtype))
        assert all(t.dtype == wide for t in c)
    assert c.log_decay.isfinite().all()
