"""The EMA in a graph is that of its definition: with fewer poles, and in blocks in both directions."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from mega_fairseq.export import ema as exported
from mega_fairseq.export.ema import BLOCK, Poles, ema_both_directions, poles, reduced
from mega_fairseq.modules import DampedEMA
from mega_fairseq.ops.ema import EMACoefficients, ema_naive
from tests.helpers.exported import assert_near, random, run
from tests.helpers.parameters import perturbed
from tests.helpers.profiles import examples

DIM = 6
LENGTHS = [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 67, 4 * BLOCK]


def ema(both=False, ndim=16, spread=0.3, seed=0):
    """With poles and weights that a training moved away from their first values by `spread`."""
    torch.manual_seed(seed)
    return perturbed(DampedEMA(DIM, ndim, both), spread)


def definition(module, x, lengths=None, truncation=None):
    """Step by step in double precision, (B, L, D)."""
    coefficients = EMACoefficients(*(t.double() for t in module.coefficients()))
    lengths = None if lengths is None else torch.tensor(lengths)
    y, _ = ema_naive(torch.tensor(x).double(), coefficients, None, module.omega.double(), lengths, truncation)
    return F.silu(y).detach()


# ------------------------------------------------------------------------------------------- fewer poles


def full_poles(module):
    log_decay, expand, project = (t.detach().double().numpy()[0] for t in module.coefficients())
    return Poles(np.exp(log_decay), expand * project)


def check_reduced(ndim, spread, seed):
    full = full_poles(ema(ndim=ndim, spread=spread, seed=seed))
    lags = np.concatenate([np.arange(200), np.random.default_rng(seed).integers(200, 8193, 200)])
    few, kernel = reduced(full), full.kernel(lags)
    assert few.states <= full.states
    assert (np.abs(few.kernel(lags) - kernel).max(1) <= 2e-6 * np.abs(kernel).max(1)).all()
    assert np.abs(few.weights).sum() <= 4 * np.abs(full.weights).sum()
    for row, decays in enumerate(few.decays):
        assert set(decays) <= set(full.decays[row])
    return few.states


@given(st.integers(1, 16), st.sampled_from([0.0, 0.1, 0.3, 1.0, 4.0]), st.integers(0, 99))
@examples(40)
def test_fewer_poles_have_the_same_kernels_at_all_lags_and_small_weights(ndim, spread, seed):
    check_reduced(ndim, spread, seed)


def test_half_of_the_poles_are_enough_near_the_first_values():
    assert check_reduced(16, 0.0, 0) <= 8


def test_weights_that_cancel_each_other_are_detected(monkeypatch):
    def neighbours(columns):
        return np.abs(columns).sum(1).argsort(1)

    monkeypatch.setattr(exported, "_farthest_first", neighbours)
    monkeypatch.setattr(exported, "CUT_OFF", 0.0)
    with pytest.raises(AssertionError):
        check_reduced(16, 0.0, 0)


# ------------------------------------------------------------------------------------------- both directions


def check_both(length, truncation, **options):
    module, lengths = ema(both=True, **options), [length, max(1, length - 5), 1]
    x = random(3, length, DIM) * (np.arange(length) < np.array(lengths)[:, None])[..., None].astype(np.float32)
    (y,) = run(lambda g, x: ema_both_directions(g, x, *poles(module), module.omega, truncation), x)
    expected = definition(module, x, lengths, truncation)
    for row, real in enumerate(lengths):
        assert_near(y[row, :real], expected[row, :real])


@pytest.mark.parametrize("truncation", [None, 1, 4, BLOCK - 1, BLOCK, BLOCK + 8, 200])
@pytest.mark.parametrize("length", LENGTHS)
def test_both_directions_of_padded_rows(length, truncation):
    check_both(length, truncation)


@pytest.mark.parametrize("spread", [0.0, 3.0, 20.0])
@pytest.mark.parametrize("ndim", [1, 4, 16])
def test_both_directions_with_any_poles(ndim, spread):
    check_both(67, None, ndim=ndim, spread=spread)
    check_both(67, 4, ndim=ndim, spread=spread)


@pytest.mark.parametrize("truncation", [None, 4])
def test_the_same_kernel_in_both_directions_is_detected(truncation):
    module, x = ema(both=True), random(1, 40, DIM)
    forward, _ = poles(module)
    (y,) = run(lambda g, x: ema_both_directions(g, x, forward, forward, module.omega, truncation), x)
    with pytest.raises(AssertionError):
        assert_near(y, definition(module, x, truncation=truncation))
