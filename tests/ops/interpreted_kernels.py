"""Tests of the Triton kernels in Triton's interpreter: `test_triton.py` runs them in a process of their own."""

import math

import pytest
import torch

from mega_fairseq.modules import damped_ema
from mega_fairseq.modules.mixers.mega import DampedEMA
from mega_fairseq.ops import gates as gating
from mega_fairseq.ops.ema import ema_coefficients, ema_naive
from mega_fairseq.ops.ema import triton as ema_triton
from mega_fairseq.ops.gates import gated_output, gated_output_naive
from tests.ops.helpers import assert_same, noise, relative_error, with_gradients

BATCH, DIM, NDIM = 3, 35, 3  # more channels than a warp has lanes, and a number of states that is padded
NAMES = ("alpha", "delta", "beta", "eta")
SHORT = 8  # steps of a segment


@pytest.fixture(autouse=True)
def short_segments(monkeypatch):
    monkeypatch.setattr(ema_triton, "MIN_STEPS", SHORT)
    monkeypatch.setattr(ema_triton, "MAX_STEPS", SHORT)
    monkeypatch.setattr(ema_triton, "PARTS", 4)


def logits(directions):
    """Some slow and some fast decays."""
    return {name: 2.0 * noise(directions, DIM, NDIM, seed=i).requires_grad_() for i, name in enumerate(NAMES)}


def kernels(alpha, delta, beta, eta, x, state=None, skip=None, lengths=None):
    y, end = ema_triton.triton_ema(x, (alpha, delta, beta, eta), state, skip, lengths)
    return (y, end) if alpha.size(0) == 1 else y


def definition(alpha, delta, beta, eta, x, state=None, skip=None, lengths=None):
    """Row by row, step by step, with zeros after the end of a row."""
    ahead, *back = (ema_coefficients(*of) for of in zip(alpha, delta, beta, eta))
    ys, ends = [], []
    for row, length in zip(range(len(x)), [x.size(1)] * len(x) if lengths is None else lengths.tolist()):
        of_row, start = x[row : row + 1, :length], None if state is None else state[row : row + 1]
        if length == 0:
            y, end = of_row, x.new_zeros(1, DIM, NDIM) if start is None else start
        else:
            y, end = ema_naive(of_row, ahead, start)
        if back and length:
            y = y + ema_naive(of_row.flip(1), back[0])[0].flip(1)
        y = y if skip is None else y + skip * of_row
        ys.append(torch.cat([y, x.new_zeros(1, x.size(1) - length, DIM)], 1))
        ends.append(end)
    return torch.cat(ys) if back else (torch.cat(ys), torch.cat(ends))


CASES = {
    "one step": (1, 1, {}),
    "one segment": (SHORT, 1, {"skip"}),
    "segments": (3 * SHORT, 1, {"skip", "state"}),
    "an incomplete segment": (2 * SHORT + 3, 1, {"state"}),
    "pads": (2 * SHORT + 3, 1, {"skip", "state", "lengths"}),
    "pads in one segment": (SHORT - 1, 1, {"lengths"}),
    "both directions, one segment": (SHORT - 2, 2, {"skip"}),
    "both directions": (2 * SHORT + 3, 2, set()),
    "both directions, pads": (2 * SHORT + 3, 2, {"skip", "lengths"}),
}


def inputs(name):
    length, directions, given = CASES[name]
    found = {**logits(directions), "x": noise(BATCH, DIM, length, seed=10).transpose(1, 2).requires_grad_()}
    if "state" in given:
        found["state"] = noise(BATCH, DIM, NDIM, seed=11, grad=True)
    if "skip" in given:
        found["skip"] = noise(DIM, seed=12, grad=True)
    if "lengths" in given:
        found["lengths"] = torch.tensor([length, -1, 0, -1, length // 2])[::2]
    return found


@pytest.mark.parametrize("name", CASES)
def test_the_kernels_equal_the_definition_in_values_and_all_gradients(name):
    assert_same(with_gradients(kernels, inputs(name)), with_gradients(definition, inputs(name)))


def test_gradients_of_the_outputs_alone_need_none_of_the_state():
    def first(function):
        return lambda **given: function(**given)[0]

    assert_same(
        with_gradients(first(kernels), inputs("segments")), with_gradients(first(definition), inputs("segments"))
    )


def test_a_gradient_that_does_not_cross_segments_would_be_detected(monkeypatch):
    of_tables = ema_triton._of_tables
    monkeypatch.setattr(ema_triton, "_of_tables", lambda *given, back: of_tables(*given[:5], None, back))
    with pytest.raises(AssertionError, match="gradient of"):
        test_the_kernels_equal_the_definition_in_values_and_all_gradients("segments")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("directions", [1, 2])
def test_sums_are_in_float32_for_every_dtype_of_the_input(dtype, directions):
    given = inputs("segments" if directions == 1 else "both directions")
    given = {name: t.detach().to(dtype if name == "x" else torch.float32) for name, t in given.items()}
    found = kernels(**given)
    y, end = found if directions == 1 else (found, None)
    truth = definition(**{name: t.double() for name, t in given.items()})
    exact, exact_end = truth if directions == 1 else (truth, None)
    assert y.dtype == dtype
    assert relative_error(y, exact) < max(torch.finfo(dtype).eps / 2, 1e-6)
    assert end is None or (end.dtype == torch.float32 and relative_error(end, exact_end) < 1e-6)


@pytest.mark.parametrize("value", [1e3, 30.0, -30.0, -1e3])
def test_coefficients_and_gradients_are_exact_for_huge_logits(value):
    def changed(directions):
        given = {name: t.detach().clone() for name, t in logits(directions).items()}
        given["alpha"][0, :2], given["delta"][0, 1:3] = value, value
        return {name: t.requires_grad_() for name, t in given.items()}

    def tables(**given):
        return ema_triton._Coefficients.apply(*given.values())[0]

    def plain(**given):
        return torch.stack([t[0].t() for t in ema_coefficients(*given.values())])

    assert_same(with_gradients(tables, changed(1)), with_gradients(plain, changed(1)), atol=0.0)


def test_slow_decays_are_accurate_to_five_digits(monkeypatch):
    x = noise(1, 2048, 1, dtype=torch.float32)
    given = {"alpha": -5.0, "delta": -7.0, "beta": 1.0, "eta": 1.0}
    given = {name: torch.full((1, 1, 1), value) for name, value in given.items()}
    monkeypatch.setattr(ema_triton, "MIN_STEPS", 512)  # as long as on a GPU
    monkeypatch.setattr(ema_triton, "MAX_STEPS", 512)
    y, _ = ema_triton.triton_ema(x, list(given.values()))
    exact, _ = ema_naive(x.double(), ema_coefficients(*(t[0].double() for t in given.values())))
    assert relative_error(y, exact) < 1e-5


@pytest.mark.parametrize("decay", [0.0, -1.0, -3.0, -9.0], ids=["slow", "half", "fast", "faster"])
def test_a_loud_segment_leaves_no_rounding_errors_in_later_ones(decay):
    x = noise(1, 3 * SHORT, 1, dtype=torch.float32)
    x[:, :SHORT] *= 1e4
    given = {"alpha": -decay, "delta": 5.0, "beta": 1.0, "eta": 1.0}
    given = {name: torch.full((1, 1, 1), value) for name, value in given.items()}
    y, end = ema_triton.triton_ema(x, list(given.values()))
    exact, exact_end = ema_naive(x.double(), ema_coefficients(*(t[0].double() for t in given.values())))
    assert relative_error(y[:, 2 * SHORT :], exact[:, 2 * SHORT :]) < 1e-6
    assert relative_error(end, exact_end) < 1e-6


@pytest.mark.parametrize("name", NAMES)
def test_a_parameter_that_is_nan_is_not_hidden(name):
    given = {name: t.detach().clone() for name, t in logits(1).items()}
    given[name][0, 0, 0] = math.nan
    y, _ = kernels(**given, x=noise(1, 3, DIM))
    assert y[..., 0].isnan().all()
    assert y[..., 1:].isfinite().all()


def test_tensors_on_several_devices_are_refused():
    given = {**logits(1), "x": noise(BATCH, 3, DIM), "state": noise(BATCH, DIM, NDIM).to("meta")}
    with pytest.raises(ValueError, match="the EMA state and x are on different devices, meta and cpu"):
        kernels(**given)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_the_module_gives_the_same_with_kernels_also_for_pads_on_the_left(bidirectional, monkeypatch):
    torch.manual_seed(0)
    module = DampedEMA(DIM, NDIM, bidirectional).double()
    padding = torch.zeros(BATCH, 2 * SHORT + 3, dtype=torch.bool)
    padding[0, :5], padding[1, -4:] = True, True

    def run(x):
        y = module(x, padding_mask=padding)
        return y if bidirectional else y[0]

    given = {"x": noise(*padding.shape, DIM, grad=True)}
    truth = with_gradients(run, given)
    monkeypatch.setattr(damped_ema, "kernels_run", lambda x: True)
    assert_same(with_gradients(run, given), truth)


def test_more_states_than_a_thread_can_hold_take_the_plain_form(monkeypatch):
    monkeypatch.setattr(damped_ema, "kernels_run", lambda x: True)
    monkeypatch.setattr(ema_triton, "triton_ema", None)
    y, _ = DampedEMA(4, 17)(torch.ones(1, 3, 4))
    assert y.isfinite().all()
    with pytest.raises(TypeError, match="'NoneType' object is not callable"):
        DampedEMA(4, 16)(torch.ones(1, 3, 4))


@pytest.mark.parametrize("dropped", [False, True], ids=["whole", "dropout"])
@pytest.mark.parametrize("hidden", [False, True], ids=["cross", "own"])
def test_gates_equal_the_naive_form_in_values_and_all_gradients(hidden, dropped, monkeypatch):
    rows, dim, width = 5, 7, 11
    total = dim + width + dim * hidden
    shapes = {
        "gate_input": (2, rows, dim), "attended": (2, rows, width), "residual": (2, rows, dim),
        "weight": (total, dim), "bias": (total,), "output": (dim, width), "output_bias": (dim,),
    }  # fmt: skip
    # Every other column of a wider tensor: the kernels read contiguous rows.
    given = {
        name: noise(*shape[:-1], 2 * shape[-1], seed=i)[..., ::2].requires_grad_()
        for i, (name, shape) in enumerate(shapes.items())
    }
    keep = (noise(2, rows, 2 * dim, seed=20) > -0.5)[..., ::2] if dropped else None

    def by(function):
        def run(gate_input, attended, residual, weight, bias, output, output_bias):
            gates, hidden = (weight, bias), (output, output_bias)
            return function(gate_input, attended, residual, gates, hidden, "silu", keep, 1.0 / math.sqrt(2))

        return run

    monkeypatch.setattr(gating, "kernels_run", lambda x: True)
    assert_same(with_gradients(by(gated_output), given), with_gradients(by(gated_output_naive), given))
