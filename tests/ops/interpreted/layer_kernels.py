"""The kernels of projections, norms and gates equal their definitions."""

import math
from functools import partial

import pytest
import torch

from mega_fairseq.modules.normalization import SequenceNorm
from mega_fairseq.ops import norm as norms
from mega_fairseq.ops.dense import dense, dense_naive
from mega_fairseq.ops.dense import triton as dense_triton
from mega_fairseq.ops.gates import gate_output
from mega_fairseq.ops.gates.naive import gate_output_naive
from mega_fairseq.ops.gates.projection import gated_projection, gated_projection_naive
from mega_fairseq.ops.norm import normalized, normalized_naive
from mega_fairseq.ops.norm import triton as norm_triton
from mega_fairseq.ops.timestep_norm import Statistics, timestep_norm, timestep_norm_naive
from mega_fairseq.ops.timestep_norm import triton as timestep_norm_triton
from mega_fairseq.ops.timestep_norm.naive import no_statistics
from tests.ops.gates import definition, fused, of_gated, shapes_of_gates
from tests.ops.helpers import assert_same, noise, with_gradients


@pytest.mark.parametrize("activation", ["silu", "linear", "relu"])
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 37, 5), (3, 300, 33), (0, 4, 3)], ids=str)
def test_a_projection_equals_its_definition_in_values_and_gradients(shape, activation):
    *batch, width = shape
    tensors = {"x": noise(*batch, 3, seed=1), "weight": noise(width, 3, seed=2), "bias": noise(width, seed=3)}
    tensors = {name: t.requires_grad_() for name, t in tensors.items()}
    results = (with_gradients(partial(form, activation=activation), tensors) for form in (dense, dense_naive))
    assert_same(*results)


@pytest.mark.parametrize("values", [True, False], ids=["values", "no values"])
@pytest.mark.parametrize(
    ("shape", "bias", "activation"),
    [
        *((shape, True, "silu") for shape in ((1, 1, 1), (2, 37, 5), (3, 300, 33), (0, 4, 3))),
        *(((2, 37, 5), bias, "gelu") for bias in (True, False)),
        ((2, 37, 5), False, "silu"),
    ],
    ids=str,
)
def test_a_gated_projection_equals_its_definition_in_values_and_gradients(shape, bias, activation, values):
    *batch, width = shape
    shapes = {"x": (*batch, 3), "values": shape, "gate": (width, 3), "gate_bias": (width,), "weight": (4, width)}
    shapes.update({"bias": (4,)} if bias else {})
    if not values:
        del shapes["values"]
    tensors = {name: noise(*shape, seed=i, grad=True) for i, (name, shape) in enumerate(shapes.items())}
    check_gated_projection(tensors, activation)


def test_values_of_a_gated_projection_may_be_transposed():
    shapes = {"x": (1, 37, 3), "values": (1, 5, 37), "gate": (5, 3), "gate_bias": (5,), "weight": (4, 5)}
    tensors = {name: noise(*shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}
    tensors["values"] = tensors["values"].transpose(1, 2)
    check_gated_projection({name: t.requires_grad_() for name, t in tensors.items()}, "silu")


def check_gated_projection(tensors, activation):
    forms = (of_gated(form, activation) for form in (gated_projection, gated_projection_naive))
    assert_same(*(with_gradients(form, tensors) for form in forms))


def test_rows_that_a_sum_leaves_out_are_detected(monkeypatch):
    monkeypatch.setattr(dense_triton, "add_sums", lambda sums, dtype: sums[:-1].sum(0).to(dtype))
    with pytest.raises(AssertionError, match="gradient of bias"):
        test_a_projection_equals_its_definition_in_values_and_gradients((3, 300, 33), "silu")


@pytest.mark.parametrize("center", [True, False], ids=["layer norm", "rms norm"])
@pytest.mark.parametrize(
    ("shape", "parameters"),
    [
        *((shape, ("weight", "bias")) for shape in ((1, 1, 1), (2, 37, 5), (3, 300, 33), (4, 1100), (0, 4, 3))),
        *(((2, 37, 5), parameters) for parameters in ((), ("weight",))),
    ],
    ids=str,
)
def test_a_norm_equals_its_definition_in_values_and_gradients(shape, center, parameters):
    x = (3.0 + noise(*shape, seed=1)).requires_grad_()
    tensors = {"x": x, **{name: noise(shape[-1], seed=i, grad=True) for i, name in enumerate(parameters)}}

    def run(form):
        return with_gradients(lambda x, weight=None, bias=None: form(x, weight, bias, 1e-5, center), tensors)

    assert_same(run(normalized), run(normalized_naive))


@pytest.mark.parametrize("lengths", [None, torch.tensor([9, 0, 4])], ids=["no pads", "pads"])
@pytest.mark.parametrize("parameters", [(), ("weight", "bias")], ids=str)
@pytest.mark.parametrize("length", [9, 1, 12])
def test_a_timestep_norm_equals_its_definition_in_values_and_gradients(length, parameters, lengths, monkeypatch):
    monkeypatch.setattr(timestep_norm_triton, "TILE", 16)  # four tokens of four channels
    shapes = {"x": (3, length, 8), "mean": (3, 2), "var": (3, 2), **dict.fromkeys(parameters, (8,))}
    tensors = {name: noise(*shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}
    tensors["var"] = tensors["var"].exp()
    tensors = {name: t.requires_grad_() for name, t in tensors.items()}
    count, lengths = torch.tensor([0, 3, 100_000]), None if lengths is None else lengths.clamp_max(length)

    def run(form):
        def outputs(x, mean, var, weight=None, bias=None):
            y, (_, *end) = form(x, weight, bias, Statistics(count, mean, var), lengths, 1e-5)
            return (y, *end)

        return with_gradients(outputs, tensors)

    assert_same(run(timestep_norm), run(timestep_norm_naive))


def test_a_gradient_without_that_of_the_last_statistics_is_detected(monkeypatch):
    backward = timestep_norm_triton.backward
    monkeypatch.setattr(timestep_norm_triton, "backward", lambda grads, *args: backward([grads[0], *[None] * 4], *args))
    with pytest.raises(AssertionError, match="gradient of x"):
        test_a_timestep_norm_equals_its_definition_in_values_and_gradients(9, (), None, monkeypatch)


def test_timestep_norms_in_float32_do_not_drift_over_100_000_tokens():
    x = (noise(1, 100_032, 4) + 100.0).float()
    (y, state), (truth, exact) = (
        timestep_norm(t, None, None, no_statistics(t, 1), None, 1e-5) for t in (x, x.double())
    )
    assert (y - truth).abs().max() < 3e-5
    assert max((state.mean - exact.mean).abs().max(), (state.var / exact.var - 1.0).abs().max()) < 1e-5


def test_a_gradient_that_forgets_the_mean_is_detected(monkeypatch):
    whole = norm_triton._launch

    def launch(kernel, *args, CENTER, **options):
        whole(kernel, *args, CENTER=CENTER and kernel is norm_triton.normalize, **options)

    monkeypatch.setattr(norm_triton, "_launch", launch)
    with pytest.raises(AssertionError, match="gradient of x"):
        test_a_norm_equals_its_definition_in_values_and_gradients((2, 37, 5), True, ())


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm", "scalenorm"])
def test_the_norms_of_modules_equal_those_without_kernels(kind, monkeypatch):
    norm = SequenceNorm(kind, 6).to(torch.float64)
    tensors = {"x": noise(2, 9, 6, grad=True), **dict(norm.norm.named_parameters())}

    def run(x, **parameters):
        return norm(x)

    ours = with_gradients(run, tensors)
    for forms in (norms.normalized, norms.layer_norm):
        monkeypatch.setattr(forms, "triton", None)
    assert_same(ours, with_gradients(run, tensors))


def test_the_gradient_of_a_bias_in_half_precision_is_a_sum_in_float32():
    x, weight = (torch.ones(*shape, dtype=torch.float16) for shape in ((9000, 1), (2, 1)))
    bias = torch.zeros(2, dtype=torch.float16, requires_grad=True)
    dense(x, weight, bias).sum().backward()
    assert bias.grad.tolist() == [9000.0, 9000.0]


@pytest.mark.parametrize("dropped", [False, True], ids=["whole", "dropout"])
@pytest.mark.parametrize("hidden", [False, True], ids=["cross", "own"])
def test_gates_equal_the_naive_form_in_values_and_all_gradients(hidden, dropped):
    length, dim, width = 150, 7, 11
    shapes = shapes_of_gates(2, length, dim, width, hidden)
    # Every other column of a wider tensor: the kernels read contiguous rows.
    tensors = {
        name: noise(*shape[:-1], 2 * shape[-1], seed=i)[..., ::2].requires_grad_()
        for i, (name, shape) in enumerate(shapes.items())
    }
    keep = (noise(2, length, 2 * dim, seed=20) > -0.5)[..., ::2] if dropped else None
    forms = (form(keep=keep, scale=1.0 / math.sqrt(2)) for form in (fused, definition))
    assert_same(*(with_gradients(form, tensors) for form in forms))


@torch.no_grad()
@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "transposed"])  # as a replaced layer may return
@pytest.mark.parametrize("own", [True, False], ids=["own", "cross"])
def test_gates_of_single_tokens_equal_the_definition(own, transposed):
    projected = noise(60, 5, seed=1).t() if transposed else noise(5, 60, seed=1)
    update, reset, candidate = projected[:, 2:9], projected[:, 9:20], projected[:, 20:27]
    attended, residual, weight = noise(5, 11, seed=2), noise(5, 7, seed=3), noise(7, 11, seed=4)

    def hidden(x):
        return (weight @ x.t()).t().clone() if transposed else x @ weight.t()

    args = (update, reset, candidate if own else None, attended, residual, hidden)
    torch.testing.assert_close(gate_output(*args), gate_output_naive(*args), rtol=1e-9, atol=1e-9)
