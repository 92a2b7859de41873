"""The kernels of both EMAs equal their definitions."""

import math

import pytest
import torch
import torch.nn.functional as F

from mega_fairseq.modules import DampedEMA
from mega_fairseq.ops.cema import cema, cema_coefficients, cema_naive, cema_token
from mega_fairseq.ops.ema import ema, ema_coefficients, ema_naive, ema_token
from mega_fairseq.ops.ema import triton as ema_triton
from mega_fairseq.ops.ema.coefficients import ema_coefficients_naive
from tests.ops.helpers import assert_same, noise, relative_error, with_gradients
from tests.ops.interpreted.conftest import SHORT

BATCH, DIM, NDIM = 3, 33, 3  # more channels than a warp has lanes, and a number of states that is padded
NAMES = ("alpha", "delta", "beta", "eta")


def logits(directions):
    """Some slow and some fast decays."""
    return {name: 2.0 * noise(directions, DIM, NDIM, seed=i).requires_grad_() for i, name in enumerate(NAMES)}


def kernels(alpha, delta, beta, eta, x, **options):
    y, end = ema(x, ema_coefficients(alpha, delta, beta, eta), **options)
    return y if end is None else (y, end)


def definition(alpha, delta, beta, eta, x, **options):
    y, end = ema_naive(x, ema_coefficients_naive(alpha, delta, beta, eta), **options)
    return y if end is None else (y, end)


CASES = {  # length, directions, other arguments
    "one segment": (SHORT, 1, {"skip"}),
    "segments": (3 * SHORT, 1, {"skip", "state"}),
    "a segment of one step": (SHORT + 1, 1, {"state"}),
    "pads": (2 * SHORT + 3, 1, {"skip", "state", "lengths"}),
    "pads in one segment": (SHORT - 1, 1, {"lengths"}),
    "both directions, one segment": (SHORT - 2, 2, {"skip"}),
    "both directions, pads": (2 * SHORT + 3, 2, {"skip", "lengths"}),
}


def inputs(name):
    length, directions, options = CASES[name]
    tensors = {**logits(directions), "x": noise(BATCH, DIM, length, seed=10).transpose(1, 2).requires_grad_()}
    if "state" in options:
        tensors["state"] = noise(BATCH, DIM, NDIM, seed=11, grad=True)
    if "skip" in options:
        tensors["skip"] = noise(DIM, seed=12, grad=True)
    if "lengths" in options:
        tensors["lengths"] = torch.tensor([length, 0, length // 2])
    return tensors


@pytest.mark.parametrize("name", CASES)
def test_kernels_equal_the_definition_in_values_and_gradients(name):
    assert_same(with_gradients(kernels, inputs(name)), with_gradients(definition, inputs(name)))


def complex_inputs(name):
    """The same with complex states."""
    tensors = inputs(name)
    tensors = {**{name: tensors.pop(name).detach()[0] for name in NAMES}, **tensors}
    tensors["theta"], tensors["gamma"] = tensors.pop("beta")[:, 0], torch.stack([tensors.pop("eta")] * 2, -1)
    tensors["gamma"][..., 1] *= -0.5
    if "state" in tensors:
        tensors["state"] = noise(BATCH, DIM, NDIM, 2, seed=11)
    return {name: t if name == "lengths" else t.detach().requires_grad_() for name, t in tensors.items()}


def of_complex(form):
    return lambda alpha, delta, theta, gamma, x, **options: form(
        x, cema_coefficients(alpha, delta, theta, gamma), **options
    )


@pytest.mark.parametrize("name", [name for name, (_, directions, _) in CASES.items() if directions == 1])
def test_kernels_of_complex_states_equal_the_definition_in_values_and_gradients(name, monkeypatch):
    monkeypatch.setattr(ema_triton, "STATES_WITH_GRADIENTS", 2)  # each program computes gradients of one state
    ours, truth = (with_gradients(of_complex(form), complex_inputs(name)) for form in (cema, cema_naive))
    assert_same(ours, truth)


def test_complex_states_do_not_drift_over_several_segments(monkeypatch):
    monkeypatch.setattr(ema_triton, "SEGMENT", 256)
    x, of_single = noise(1, 1000, 1, dtype=torch.float32), [torch.full((1, 2), -5.0)] * 2
    parameters = [*of_single, torch.tensor([2.0]), torch.tensor([[[1.0, 0.5], [-0.5, 1.0]]])]
    ours = cema(x, cema_coefficients(*parameters))
    truth = cema_naive(x.double(), cema_coefficients(*(t.double() for t in parameters)))
    assert max(map(relative_error, ours, truth)) < 3e-5  # 256 times the rounding error of a decay


def test_gradients_of_the_outputs_alone_need_none_of_the_state():
    def first(function):
        return lambda **tensors: function(**tensors)[0]

    ours, truth = (
        with_gradients(first(function), inputs("a segment of one step")) for function in (kernels, definition)
    )
    assert_same(ours, truth)


def test_a_skip_in_half_precision_has_a_gradient_in_its_dtype():
    tensors = {**inputs("one segment"), "skip": noise(DIM, seed=12).half().requires_grad_()}
    ours, truth = (with_gradients(function, tensors)["gradient of skip"] for function in (kernels, definition))
    assert ours.dtype == torch.float16
    torch.testing.assert_close(ours, truth, rtol=2**-10, atol=0)


def test_a_gradient_that_does_not_cross_segments_is_detected(monkeypatch):
    gradients = ema_triton._coefficient_gradients
    monkeypatch.setattr(ema_triton, "_coefficient_gradients", lambda *a, BACK: gradients(*a[:5], None, a[6], BACK=BACK))
    with pytest.raises(AssertionError, match="gradient of"):
        test_kernels_equal_the_definition_in_values_and_gradients("a segment of one step")


def test_the_length_of_a_segment_does_not_depend_on_the_batch():
    cuts = {ema_triton._segments(torch.empty(batch, 1000, DIM)) for batch in (1, 7, 1000)}
    assert len(cuts) == 1
    tensors = {name: t.detach() for name, t in inputs("pads").items()}
    whole = kernels(**tensors)[0]
    for row in range(BATCH):
        alone = {name: t[row : row + 1] if name in ("x", "state", "lengths") else t for name, t in tensors.items()}
        assert torch.equal(kernels(**alone)[0], whole[row : row + 1])


@pytest.mark.parametrize(
    ("dtype", "name"),
    [(torch.float16, "segments"), (torch.bfloat16, "both directions, pads"), (torch.float32, "segments")],
)
def test_sums_are_in_float32_for_every_dtype_of_the_input(dtype, name):
    dtypes = {"x": dtype, "lengths": torch.long}
    tensors = {n: t.detach().to(dtypes.get(n, torch.float32)) for n, t in inputs(name).items()}
    ours = kernels(**tensors)
    truth = definition(**{n: t if n == "lengths" else t.double() for n, t in tensors.items()})
    (y, *end), (exact, *exact_end) = ((r if isinstance(r, tuple) else (r,)) for r in (ours, truth))
    assert y.dtype == dtype
    assert relative_error(y, exact) < max(torch.finfo(dtype).eps / 2, 1e-6)
    assert all(t.dtype == torch.float32 and relative_error(t, e) < 1e-6 for t, e in zip(end, exact_end))


@pytest.mark.parametrize("value", [1e3, 30.0, -30.0, -1e3])
def test_coefficients_and_gradients_are_exact_for_huge_logits(value):
    def changed():
        tensors = {name: t.detach().clone() for name, t in logits(2).items()}
        tensors["alpha"][0, :2], tensors["delta"][0, 1:3] = value, value
        return {name: t.requires_grad_() for name, t in tensors.items()}

    def tables(form):
        return with_gradients(lambda **logits: tuple(form(**logits)), changed())

    assert_same(tables(ema_coefficients), tables(ema_coefficients_naive), atol=0.0)


def one_channel(**values):
    return {name: torch.full((1, 1, 1), value) for name, value in values.items()}


def test_slow_decays_are_accurate_to_five_digits(monkeypatch):
    x = noise(1, 1024, 1, dtype=torch.float32)
    channel = one_channel(alpha=-5.0, delta=-7.0, beta=1.0, eta=1.0)
    monkeypatch.setattr(ema_triton, "SEGMENT", 256)
    y, _ = kernels(**channel, x=x)
    exact, _ = definition(**{name: t.double() for name, t in channel.items()}, x=x.double())
    assert relative_error(y, exact) < 1e-5


@pytest.mark.parametrize("decay", [0.0, -3.0, -9.0], ids=["slow", "fast", "faster"])
def test_a_loud_segment_leaves_no_rounding_errors_in_later_ones(decay):
    x = noise(1, 3 * SHORT, 1, dtype=torch.float32)
    x[:, :SHORT] *= 1e4
    channel = one_channel(alpha=-decay, delta=5.0, beta=1.0, eta=1.0)
    y, end = kernels(**channel, x=x)
    exact, exact_end = definition(**{name: t.double() for name, t in channel.items()}, x=x.double())
    assert relative_error(y[:, 2 * SHORT :], exact[:, 2 * SHORT :]) < 1e-6
    assert relative_error(end, exact_end) < 1e-6


@pytest.mark.parametrize("name", NAMES)
def test_a_parameter_that_is_nan_is_not_hidden(name):
    tensors = {name: t.detach().clone() for name, t in logits(1).items()}
    tensors[name][0, 0, 0] = math.nan
    y, _ = kernels(**tensors, x=noise(1, 3, DIM))
    assert y[..., 0].isnan().all()
    assert y[..., 1:].isfinite().all()


def test_more_states_than_a_thread_can_hold_take_the_plain_form(monkeypatch):
    monkeypatch.setattr(ema_triton, "ema_triton", None)
    y, _ = DampedEMA(4, 17)(torch.ones(1, 3, 4))
    assert y.isfinite().all()
    with pytest.raises(TypeError, match="'NoneType' object is not callable"):
        DampedEMA(4, 16)(torch.ones(1, 3, 4))


@torch.no_grad()
@pytest.mark.parametrize("many", [1, 1000], ids=["rows together", "rows alone"])
@pytest.mark.parametrize("skip", [None, noise(DIM, seed=12)], ids=["no skip", "skip"])
def test_single_tokens_equal_the_definition(skip, many, monkeypatch):
    monkeypatch.setattr(ema_triton, "MANY_ROWS", many)
    coefficients = ema_coefficients(*logits(1).values())
    x, state = noise(7, 2 * DIM, seed=10)[:, :DIM], noise(7, DIM, NDIM, seed=11)
    truth, end = ema_naive(x.unsqueeze(1), coefficients, state, skip)
    for silu, expected in ((False, truth[:, 0]), (True, F.silu(truth[:, 0]))):
        found = ema_token(x, coefficients, state, skip, silu=silu)
        torch.testing.assert_close(found, (expected, end), rtol=1e-9, atol=1e-9)


@torch.no_grad()
@pytest.mark.parametrize("skip", [None, noise(DIM, seed=12)], ids=["no skip", "skip"])
def test_single_tokens_with_complex_states_equal_the_definition(skip):
    shapes = (DIM, NDIM), (DIM, NDIM), (DIM,), (DIM, NDIM, 2)
    coefficients = cema_coefficients(*(noise(*shape, seed=i) for i, shape in enumerate(shapes)))
    x, state = noise(7, 2 * DIM, seed=10)[:, :DIM], noise(7, DIM, NDIM, 2, seed=11)
    truth, end = cema_naive(x.unsqueeze(1), coefficients, state, skip)
    found = cema_token(x, coefficients, state, skip)
    torch.testing.assert_close(found, (truth[:, 0], end), rtol=1e-9, atol=1e-9)
