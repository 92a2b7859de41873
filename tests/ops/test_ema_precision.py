"""Precision of the EMA: half-precision inputs, slow decays, huge logits, autocast."""

import functools

import pytest
import torch
import torch.nn.functional as F

from mega_fairseq.modules import DampedEMA
from mega_fairseq.ops.ema import EMACoefficients, ema, ema_coefficients, ema_naive
from mega_fairseq.ops.ema.naive import ema_kernel_naive
from tests.ops.helpers import assert_close, noise, relative_error

HALF = [torch.float16, torch.bfloat16]
LENGTH = 8192


def slow_logits(dtype, dim=4, ndim=16):
    """Logits of a decay by 1/6000 per step (alpha, the released `delta`, is -8), rounded to the dtype."""
    delta, beta, eta = (noise(1, dim, ndim, seed=i).to(dtype) for i in range(3))
    return torch.full_like(delta, -8.0), delta, beta, eta


def one_step_after_the_other(x, c):
    state, ys = None, []
    for t in range(x.size(1)):
        y, state = ema(x[:, t : t + 1], c, state)
        ys.append(y)
    return torch.cat(ys, 1), state


FORMS = {
    "chosen": ema,
    "steps": one_step_after_the_other,
    "truncated": lambda x, c: ema(x, c, truncation=LENGTH),
}


def inputs(dtype):
    return slow_logits(dtype), noise(1, LENGTH, 4, seed=5).to(dtype)


@functools.lru_cache(maxsize=None)
def truth(dtype, backward=False):
    """Outputs and final state of `inputs` by the definition, in float64."""
    parameters, x = inputs(dtype)
    with torch.no_grad():
        c = ema_coefficients(*(p.double() for p in parameters))
        return ema_naive((x.flip(1) if backward else x).double(), c)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_slow_decays_over_8192_steps_are_accurate_to_one_percent_for_half_precision_inputs(form, dtype):
    parameters, x = inputs(dtype)
    with torch.no_grad():
        y, state = FORMS[form](x, ema_coefficients(*parameters))
    expected, end = truth(dtype)
    assert relative_error(y, expected) < 0.01
    assert y.dtype == dtype
    assert state.dtype == torch.float32
    assert form == "truncated" or relative_error(state, end) < 0.01


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_a_recurrence_in_half_precision_is_wrong_by_more_than_one_percent(dtype):
    (alpha, delta, beta, eta), x = inputs(dtype)
    phi = 1 - torch.sigmoid(alpha) * torch.sigmoid(delta)  # rounds to 1
    y, _ = ema(x, EMACoefficients(torch.log(phi), torch.sigmoid(alpha) * beta, eta / 4))
    assert not relative_error(y, truth(dtype)[0]) < 0.01


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_bidirectional_slow_decays_are_accurate_to_one_percent_for_half_precision_inputs(dtype):
    parameters, x = inputs(dtype)
    y, _ = ema(x, ema_coefficients(*(p.expand(2, -1, -1) for p in parameters)))
    assert relative_error(y, truth(dtype)[0] + truth(dtype, backward=True)[0].flip(1)) < 0.01


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_gradients_of_slow_decays_are_accurate_to_one_percent_for_half_precision_inputs(dtype):
    def gradients(cast):
        parameters = [p.to(cast).requires_grad_() for p in slow_logits(dtype)]
        x = noise(1, LENGTH, 4, seed=5).to(dtype).to(cast).requires_grad_()
        y, _ = ema(x, ema_coefficients(*parameters))
        (y * noise(1, LENGTH, 4, seed=6).to(dtype).to(cast)).sum().backward()
        return [p.grad for p in [*parameters, x]]

    for ours, expected in zip(gradients(dtype), gradients(torch.float64)):
        assert relative_error(ours, expected) < 0.01


@pytest.mark.parametrize("truncation", [8, 64, 1024])
def test_a_truncated_ema_in_float32_is_accurate_to_five_digits_over_8192_steps(truncation):
    parameters, x = slow_logits(torch.float32), noise(1, LENGTH, 4, seed=5, dtype=torch.float32)
    y, _ = ema(x, ema_coefficients(*parameters), truncation=truncation)
    exact = ema_coefficients(*(p.double() for p in parameters))
    windows = F.pad(x.double().transpose(1, 2), (truncation - 1, 0)).unfold(2, truncation, 1)  # (B, D, L, T)
    taps = ema_kernel_naive(exact, truncation)[0].flip(-1)
    assert relative_error(y, torch.einsum("bdlt,dt->bld", windows, taps)) < 1e-5


def test_float32_is_accurate_to_five_digits_over_8192_steps_of_any_decay():
    parameters = [p.float() for p in slow_logits(torch.float64)]
    parameters[0] = torch.linspace(-8.0, 8.0, 64).view(1, 4, 16)  # slow and fast
    x = noise(1, LENGTH, 4, seed=5, dtype=torch.float32)
    with torch.no_grad():
        exact, _ = ema_naive(x.double(), ema_coefficients(*(p.double() for p in parameters)))
        assert relative_error(ema(x, ema_coefficients(*parameters))[0], exact) < 1e-5


# ------------------------------------------------------------------------------ huge logits


@pytest.mark.parametrize("logit", [30.0, 1e4])
def test_a_decay_to_zero_leaves_only_the_current_input(logit):
    parameters = [*[torch.full((1, 2, 3), logit)] * 2, *(noise(1, 2, 3, seed=i).float() for i in (0, 1))]
    c, x = ema_coefficients(*parameters), noise(2, 70, 2, dtype=torch.float32)
    now = (c.expand * c.project).sum(-1) * x
    for form in (ema, one_step_after_the_other):
        assert_close(form(x, c)[0], now, rtol=1e-5, atol=1e-6)


def test_an_input_weight_of_zero_leaves_the_state_unchanged():
    parameters = [torch.full((1, 2, 3), -1e4), *(noise(1, 2, 3, seed=i).float() for i in (0, 1, 2))]
    c, state = ema_coefficients(*parameters), noise(2, 2, 3, dtype=torch.float32)
    y, end = ema(noise(2, 70, 2, dtype=torch.float32), c, state)
    assert torch.equal(end, state)
    assert_close(y, (state * c.project).sum(-1).unsqueeze(1).expand(-1, 70, -1), rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------------------ autocast


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("truncation", [None, 9])
def test_the_ema_and_its_gradients_stay_in_float32_under_autocast(bidirectional, truncation):
    torch.manual_seed(0)
    module = DampedEMA(6, 4, bidirectional, truncation)

    def run(autocast):
        x = noise(2, 70, 6, dtype=torch.float32, grad=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = module(x)
        results = y if isinstance(y, tuple) else (y,)
        gradients = torch.autograd.grad(results[0].square().sum(), [*module.parameters(), x])
        return [*results, *gradients]

    for cast, plain in zip(run(True), run(False)):
        assert cast.dtype == torch.float32
        assert torch.equal(cast, plain)


def test_half_precision_inputs_have_a_float32_state_under_autocast():
    c = ema_coefficients(*slow_logits(torch.float32))
    x = noise(1, 600, 4).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        y, state = ema(x, c)
        _, carried = ema(x[:, :1], c, state)
    assert y.dtype == torch.bfloat16
    assert state.dtype == carried.dtype == torch.float32
    assert_close(state, ema_naive(x.float(), c)[1], rtol=1e-5, atol=1e-6)
