"""Activated projections and gates equal their naive forms in values and all gradients; precision; memory."""

import pytest
import torch

from mega_fairseq.ops.activations import ACTIVATIONS
from mega_fairseq.ops.gating import (
    TILE_ROWS,
    activated_linear,
    activated_linear_naive,
    gated_output,
    gated_output_naive,
)
from tests.ops.helpers import assert_same, kept_for_backward, noise, relative_error, with_gradients

DIM, WIDTH = 3, 5
ROWS = [1, 2, 7, TILE_ROWS - 1, TILE_ROWS, TILE_ROWS + 1, 2 * TILE_ROWS + 3]
ACTIVATION_NAMES = sorted(ACTIVATIONS)


def linear_inputs(*shape):
    return {
        "x": noise(*shape, DIM, seed=0, grad=True),
        "weight": noise(WIDTH, DIM, seed=1, grad=True),
        "bias": noise(WIDTH, seed=2, grad=True),
    }


def gate_inputs(batch, length, candidate, dtype=torch.float64, dim=DIM, width=WIDTH):
    """X', O, X and the weights; `candidate`: whether the candidate has a projection of X'."""
    rows = dim + width + (dim if candidate else 0)
    shapes = {
        "gate_input": (batch, length, dim),
        "attended": (batch, length, width),
        "residual": (batch, length, dim),
        "weight": (rows, dim),
        "bias": (rows,),
        "hidden": (dim, width),
        "hidden_bias": (dim,),
    }
    return {name: noise(*shape, seed=i, grad=True, dtype=dtype) for i, (name, shape) in enumerate(shapes.items())}


def gated(form, activation="silu", keep=None, scale=1.0):
    def function(gate_input, attended, residual, weight, bias, hidden, hidden_bias):
        gates, hidden = (weight, bias), (hidden, hidden_bias)
        return form(gate_input, attended, residual, gates, hidden, activation, keep, scale)

    return function


def mask(*shape):
    return noise(*shape, seed=50) > -0.5


# ------------------------------------------------------------------------------- activation(x W + b)


@pytest.mark.parametrize("activation", ACTIVATION_NAMES)
@pytest.mark.parametrize("rows", ROWS)
def test_an_activated_projection_equals_its_naive_form_in_values_and_all_gradients(rows, activation):
    inputs = linear_inputs(1, rows)
    ours = with_gradients(lambda **i: activated_linear(**i, activation=activation), inputs)
    assert_same(ours, with_gradients(lambda **i: activated_linear_naive(**i, activation=activation), inputs))


@pytest.mark.parametrize("shape", [(4,), (2, 4), (2, 3, 4)])
def test_an_activated_projection_accepts_any_leading_shape(shape):
    ours = with_gradients(activated_linear, linear_inputs(*shape))
    assert_same(ours, with_gradients(activated_linear_naive, linear_inputs(*shape)))


def test_an_activated_projection_accepts_inputs_that_are_not_contiguous():
    inputs = linear_inputs(4, 6)
    turned = {**inputs, "x": inputs["x"].detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()}
    assert not turned["x"].is_contiguous()
    assert_same(with_gradients(activated_linear, turned), with_gradients(activated_linear, inputs))


# ------------------------------------------------------------------------------- gates


@pytest.mark.parametrize("candidate", [True, False], ids=["self", "cross"])
@pytest.mark.parametrize("activation", ACTIVATION_NAMES)
@pytest.mark.parametrize("rows", ROWS)
def test_the_gates_equal_their_naive_form_in_values_and_all_gradients(rows, activation, candidate):
    inputs = gate_inputs(1, rows, candidate)
    ours = with_gradients(gated(gated_output, activation), inputs)
    assert_same(ours, with_gradients(gated(gated_output_naive, activation), inputs))


@pytest.mark.parametrize("candidate", [True, False], ids=["self", "cross"])
@pytest.mark.parametrize("length", [1, 7, TILE_ROWS // 2 + 1, TILE_ROWS + 1])
def test_dropout_masks_the_candidate_in_values_and_all_gradients(length, candidate):
    inputs, keep = gate_inputs(2, length, candidate), mask(2, length, DIM)
    ours = with_gradients(gated(gated_output, keep=keep, scale=1.5), inputs)
    assert_same(ours, with_gradients(gated(gated_output_naive, keep=keep, scale=1.5), inputs))
    assert not torch.equal(ours["output 0"], gated(gated_output)(**inputs))


@pytest.mark.parametrize("candidate", [True, False], ids=["self", "cross"])
@pytest.mark.parametrize(("batch", "length"), [(1, 1), (1, TILE_ROWS + 1), (2, 5), (3, TILE_ROWS // 2 + 1)])
def test_a_mask_of_whole_channels_is_the_same_at_every_position(batch, length, candidate):
    inputs, keep = gate_inputs(batch, length, candidate), mask(batch, 1, DIM)
    ours = with_gradients(gated(gated_output, keep=keep, scale=1.5), inputs)
    everywhere = gated(gated_output_naive, keep=keep.expand(batch, length, DIM), scale=1.5)
    assert_same(ours, with_gradients(everywhere, inputs))


# ------------------------------------------------------------------------------- precision, memory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_computes_in_half_precision_and_keeps_the_dtypes_of_residual_and_gradients(dtype):
    exact = gate_inputs(2, 9, True)
    inputs = {name: t.detach().to(dtype).requires_grad_() for name, t in exact.items()}
    with torch.autocast("cpu", torch.bfloat16):
        y = gated(gated_output, keep=mask(2, 9, DIM), scale=1.5)(**inputs)
        z = activated_linear(inputs["gate_input"], inputs["weight"], inputs["bias"])
    assert y.dtype == dtype
    assert z.dtype == torch.bfloat16
    assert relative_error(y, gated(gated_output_naive, keep=mask(2, 9, DIM), scale=1.5)(**exact)) < 0.02
    gradients = torch.autograd.grad(y.float().sum() + z.float().sum(), list(inputs.values()))
    assert all(g.dtype == dtype and g.isfinite().all() for g in gradients)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_closed_update_gate_returns_the_residual_unchanged_under_autocast(dtype):
    inputs = {name: t.detach() for name, t in gate_inputs(2, 9, True, torch.float32).items()}
    inputs["weight"][:DIM], inputs["bias"][:DIM] = 0.0, -1e4
    with torch.autocast("cpu", dtype):
        assert torch.equal(gated(gated_output)(**inputs), inputs["residual"])
        assert torch.equal(gated(gated_output_naive)(**inputs), inputs["residual"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_gradients_of_weights_over_16384_rows_are_as_exact_as_plain_products(dtype):
    """With sums over tiles of 512 rows in half precision, the error would be up to 2.4 times as large."""
    given = {**gate_inputs(1, 16384, True, dim=16, width=24), "input_weight": noise(24, 16, seed=8, grad=True)}
    given["input_bias"] = noise(24, seed=9, grad=True)
    rounded = {name: t.detach().to(dtype).requires_grad_() for name, t in given.items()}
    exact = {name: t.detach().double().requires_grad_() for name, t in rounded.items()}

    def both(gates, linear):
        def function(input_weight, input_bias, **inputs):
            return gated(gates)(**inputs), linear(inputs["gate_input"], input_weight, input_bias)

        return function

    naive = both(gated_output_naive, activated_linear_naive)
    truth, plain = with_gradients(naive, exact), with_gradients(naive, rounded)
    for name, ours in with_gradients(both(gated_output, activated_linear), rounded).items():
        assert relative_error(ours, truth[name]) < 1.25 * relative_error(plain[name], truth[name]), name


def test_the_gates_save_only_one_projection_of_the_input_for_backward():
    inputs = gate_inputs(2, 2000, True)
    rows, base = 4000, DIM + WIDTH + DIM
    inputs_kept = DIM + WIDTH + DIM
    assert sum(kept_for_backward(lambda: gated(gated_output)(**inputs))) <= rows * (inputs_kept + base + DIM) + 1000
    assert sum(kept_for_backward(lambda: gated(gated_output_naive)(**inputs))) > rows * (inputs_kept + base + 4 * DIM)
