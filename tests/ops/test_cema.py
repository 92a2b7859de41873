"""The complex EMA equals its definition and its reference, in any pieces, over long streams and for huge logits."""

import math

import pytest
import torch

from mega_fairseq.ops import block_scan, precision
from mega_fairseq.ops.block_scan import BLOCK, state_after
from mega_fairseq.ops.cema import cema, cema_coefficients, cema_naive, cema_token, coefficients, naive
from mega_fairseq.ops.padding import to_front
from tests.helpers.golden_checks import assert_outputs, each
from tests.ops.helpers import Recorder, assert_same, kept_for_backward, noise, relative_error, with_gradients

BATCH, DIM, NDIM = 2, 3, 4
LENGTHS = [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 4 * BLOCK + 1]
NAMES = ("alpha", "delta", "theta", "gamma")


def parameters(dim=DIM, ndim=NDIM, **options):
    """alpha, delta, theta and gamma of a few channels, some slow and some fast."""
    shapes, options = ((dim, ndim), (dim, ndim), (dim,), (dim, ndim, 2)), {"grad": True, **options}
    return {name: noise(*shape, seed=i, **options) for i, (name, shape) in enumerate(zip(NAMES, shapes))}


def inputs(length, state=False, skip=False, lengths=False):
    tensors = {**parameters(), "x": noise(BATCH, length, DIM, seed=10, grad=True)}
    if state:
        tensors["state"] = noise(BATCH, DIM, NDIM, 2, seed=20, grad=True)
    if skip:
        tensors["skip"] = noise(DIM, seed=21, grad=True)
    if lengths:
        tensors["lengths"] = torch.tensor([length - length // 3, 0])
    return tensors


def of(form):
    return lambda alpha, delta, theta, gamma, x, **more: form(x, cema_coefficients(alpha, delta, theta, gamma), **more)


def assert_equals_the_definition(tensors, form=cema, definition=cema_naive):
    assert_same(with_gradients(of(form), tensors), with_gradients(of(definition), tensors))


# ------------------------------------------------------------------------------ reference and definition


@pytest.mark.parametrize("precision", [torch.float64, torch.float32], ids=["double", "single"])
@each("complex EMA")
def test_the_complex_ema_gives_golden_outputs_states_and_gradients(case, precision):
    def leaf(t):
        return t.to(precision, copy=True).requires_grad_()

    tensors = {name[len("cema.") :]: leaf(t) for name, t in case.parameters.items()}
    tensors["__input_x"] = leaf(case.inputs["x"])
    if "state_cema" in case.inputs:
        tensors["__input_state_cema"] = leaf(case.inputs["state_cema"])
    x, align, _ = to_front(tensors["__input_x"], case.padding)
    c, lengths = cema_coefficients(*(tensors[name] for name in NAMES)), None if align is None else align.lengths
    y, state = cema(x, c, tensors.get("__input_state_cema"), tensors["omega"], lengths)
    y = y if align is None else align.back(y)
    loss = (y * case.inputs["cotangent"].to(precision)).sum()
    (loss + (state * case.inputs["cotangent_cema"].to(precision)).sum()).backward()

    found = {"y": y, "state_cema": state, **{f"gradient of {name}": t.grad for name, t in tensors.items()}}
    expected = {name: case.outputs[name] for name in ("y", "state_cema")}
    gradients = {**case.gradients, **{f"__input_{name}": t for name, t in case.input_gradients.items()}}
    expected.update({f"gradient of {name.replace('cema.', '')}": t for name, t in gradients.items()})
    for name, truth in expected.items():
        tolerance = 1e-12 if precision == torch.float64 else 1e-5 if name.startswith("gradient") else 1e-6
        assert_outputs(found[name].double(), truth, name, tolerance * truth.abs().max().item())


@pytest.mark.parametrize(
    "options",
    [{}, {"state": True, "skip": True}, {"lengths": True}, {"state": True, "skip": True, "lengths": True}],
    ids=" ".join,
)
@pytest.mark.parametrize("length", LENGTHS)
def test_blocks_of_the_complex_ema_equal_its_definition(length, options):
    assert_equals_the_definition(inputs(length, **options))


@pytest.mark.parametrize("length", LENGTHS)
def test_a_slice_is_reduced_to_its_complex_state(length):
    tensors = inputs(length)
    tensors["gamma"].requires_grad_(False)
    assert_equals_the_definition(tensors, state_after, lambda x, c: cema_naive(x, c)[1])


def test_a_token_with_a_prepared_decay_equals_the_definition():
    def token(x, c, state, skip):
        y, state = cema_token(x[:, 0], c, state, skip, coefficients.complex_powers(c, 1))
        return y.unsqueeze(1), state

    tensors = inputs(1, state=True, skip=True)
    assert_equals_the_definition(tensors, token)
    with torch.no_grad():
        torch.testing.assert_close(of(token)(**tensors), of(cema_naive)(**tensors))


def test_a_scan_of_complex_states_on_other_devices_equals_that_on_the_cpu(monkeypatch):
    monkeypatch.setattr(block_scan, "_one_after_the_other", block_scan._by_doubling)
    assert_equals_the_definition(inputs(5 * BLOCK + 3, state=True))


def test_the_operators_of_complex_blocks_pass_the_checks_of_torch():
    c, x = [t.detach().requires_grad_() for t in cema_coefficients(**parameters())], noise(BATCH, 6, DIM, grad=True)
    torch.library.opcheck(coefficients._tables, (*c, 5))
    shapes = (BATCH, DIM, 2 * NDIM), (DIM, 3, 3), (DIM, 3, 2 * NDIM), (DIM, 2 * NDIM, 3), (1, DIM, NDIM, 2)
    tensors = [noise(*shape, seed=i, grad=True) for i, shape in enumerate(shapes)]
    torch.library.opcheck(block_scan.block_scan, (x, *tensors))


# ------------------------------------------------------------------------------ precision


def slow_and_fast(dtype):
    """1 - |q| from 2e-5 to 0.5, in float32 numbers, and all angles."""
    logit = torch.linspace(-5.4, 0.9, NDIM).expand(DIM, -1)
    theta, gamma = noise(DIM, seed=2, dtype=torch.float32), noise(DIM, NDIM, 2, seed=3, dtype=torch.float32)
    return [t.to(dtype) for t in (logit, logit, theta, gamma)]


def in_single(x):
    """Outputs in pieces, and the state after them."""
    c, state, ys = cema_coefficients(*slow_and_fast(torch.float32)), None, []
    for piece in x.split([30_000, 1, 69_999], 1):
        y, state = cema(piece, c, state)
        ys.append(y)
    return torch.cat(ys, 1), state


def test_100_000_steps_do_not_drift_and_float32_angles_would(monkeypatch):
    x = noise(1, 100_000, DIM, seed=5, dtype=torch.float32)
    truth = cema(x.double(), cema_coefficients(*slow_and_fast(torch.float64)))
    assert max(map(relative_error, in_single(x), truth)) < 2e-5
    with monkeypatch.context() as patch:
        # Angles of single steps are then rounded, like q in float32: token by token, any device is 6e-4 off.
        patch.setattr(precision, "WITHOUT_FLOAT64", ("cpu",))
        assert max(map(relative_error, in_single(x), truth)) < 4e-4

    def rounded(c, steps):
        angle = c.turns.float() * (2.0 * math.pi) * steps
        return torch.exp(c.log_decay * steps).unsqueeze(-1) * torch.stack([angle.cos(), angle.sin()], -1)

    for module in (naive, coefficients):
        monkeypatch.setattr(module, "complex_powers", rounded)
    assert max(map(relative_error, in_single(x), truth)) > 3e-4


@pytest.mark.parametrize("logit", [-40.0, 40.0])
@pytest.mark.parametrize("name", NAMES[:3])
def test_huge_logits_give_finite_outputs_and_gradients(name, logit):
    """With all three at 40, q is 0, and the authors' code gives NaN."""
    tensors = {n: t.detach().float() for n, t in inputs(BLOCK + 6, state=True).items()}
    for changed in (name, "alpha", "delta", "theta") if logit > 0.0 else (name,):
        tensors[changed] = torch.full_like(tensors[changed], logit)
    exact = {n: t.double().requires_grad_() for n, t in tensors.items()}
    ours = with_gradients(of(cema), {n: t.requires_grad_() for n, t in tensors.items()})
    for result, truth in with_gradients(of(cema_naive), exact).items():
        assert ours[result].isfinite().all()
        torch.testing.assert_close(ours[result].double(), truth, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_inputs_have_a_float32_complex_state_under_autocast(dtype):
    p = [t.to(dtype) for t in slow_and_fast(torch.float32)]
    x = noise(1, 600, DIM).to(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        c = cema_coefficients(*p)
        y, state = cema(x, c)
        _, carried = cema(x[:, :1], c, state)
    exact, end = cema_naive(x.double(), cema_coefficients(*(t.double() for t in p)))
    assert y.dtype == dtype
    assert state.dtype == carried.dtype == torch.float32
    assert relative_error(y, exact) < 0.01
    assert relative_error(state, end) < 1e-5


# ------------------------------------------------------------------------------ cost


def test_complex_blocks_create_no_state_for_every_step_and_save_little_for_backward():
    dim, ndim, length = 4, 16, 8192
    p, x = parameters(dim, ndim, dtype=torch.float32), noise(1, length, dim, grad=True, dtype=torch.float32)
    with Recorder() as recorder:
        cema(x, cema_coefficients(**p))[0].sum().backward()
    assert recorder.largest <= 4 * dim * length
    assert sum(kept_for_backward(lambda: cema(x, cema_coefficients(**p)))) <= 3 * x.numel()
