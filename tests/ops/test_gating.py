"""Activated projections and gates equal their naive forms in values and all gradients; precision; memory."""

import pytest
import torch

from mega_fairseq.ops.activations import ACTIVATIONS
from mega_fairseq.ops.gates import (
    TILE_ROWS,
    activated_linear,
    activated_linear_naive,
    gated_linear,
    gated_linear_naive,
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


def gate_and_projection(form, activation="silu"):
    """A function of X, O, and the weights and biases of a gate and of an output that is wider than X."""

    def function(x, attended, weight, bias, output, output_bias):
        return form(x, attended, (weight, bias), (output, output_bias), activation)

    return function


def one_gate_inputs(*shape, dim=DIM, width=WIDTH):
    given = {"attended": (*shape, width), "output": (dim + 1, width), "output_bias": (dim + 1,)}
    own = {name: noise(*of, seed=3 + i, grad=True) for i, (name, of) in enumerate(given.items())}
    x = {"x": (*shape, dim), "weight": (width, dim), "bias": (width,)}
    return {**own, **{name: noise(*of, seed=i, grad=True) for i, (name, of) in enumerate(x.items())}}


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


# ------------------------------------------------------------------------------- one gate, then a projection


@pytest.mark.parametrize("activation", ACTIVATION_NAMES)
@pytest.mark.parametrize("rows", ROWS)
def test_a_gate_before_a_projection_equals_its_naive_form_in_values_and_all_gradients(rows, activation):
    inputs = one_gate_inputs(1, rows)
    ours = with_gradients(gate_and_projection(gated_linear, activation), inputs)
    assert_same(ours, with_gradients(gate_and_projection(gated_linear_naive, activation), inputs))


@pytest.mark.parametrize("shape", [(4,), (2, 4), (2, 3, 4)])
def test_a_gate_before_a_projection_accepts_any_leading_shape(shape):
    inputs = one_gate_inputs(*shape)
    ours = with_gradients(gate_and_projection(gated_linear), inputs)
    assert_same(ours, with_gradients(gate_and_projection(gated_linear_naive), inputs))


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
        gate = (inputs["weight"][:WIDTH], inputs["bias"][:WIDTH])
        w = gated_linear(inputs["gate_input"], inputs["attended"], gate, (inputs["hidden"], inputs["hidden_bias"]))
    assert y.dtype == dtype
    assert z.dtype == w.dtype == torch.bfloat16
    assert relative_error(y, gated(gated_output_naive, keep=mask(2, 9, DIM), scale=1.5)(**exact)) < 0.02
    gradients = torch.autograd.grad(sum(out.float().sum() for out in (y, z, w)), list(inputs.values()))
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
    own = {"input_weight": (24, 16), "input_bias": (24,), "output": (16, 24), "output_bias": (16,)}
    given = gate_inputs(1, 16384, True, dim=16, width=24)
    given.update({name: noise(*shape, seed=8 + i, grad=True) for i, (name, shape) in enumerate(own.items())})
    rounded = {name: t.detach().to(dtype).requires_grad_() for name, t in given.items()}
    exact = {name: t.detach().double().requires_grad_() for name, t in rounded.items()}

    def together(gates, linear, gate):
        def function(input_weight, input_bias, output, output_bias, **inputs):
            x, weights = inputs["gate_input"], (input_weight, input_bias)
            return (
                gated(gates)(**inputs),
                linear(x, *weights),
                gate(x, inputs["attended"], weights, (output, output_bias)),
            )

        return function

    naive = together(gated_output_naive, activated_linear_naive, gated_linear_naive)
    truth, plain = with_gradients(naive, exact), with_gradients(naive, rounded)
    for name, ours in with_gradients(together(gated_output, activated_linear, gated_linear), rounded).items():
        assert relative_error(ours, truth[name]) < 1.25 * relative_error(plain[name], truth[name]), name


def test_the_gates_save_only_one_projection_of_the_input_for_backward():
    inputs = gate_inputs(2, 2000, True)
    rows, base = 4000, DIM + WIDTH + DIM
    inputs_kept = DIM + WIDTH + DIM
    assert sum(kept_for_backward(lambda: gated(gated_output)(**inputs))) <= rows * (inputs_kept + base + DIM) + 1000
    assert sum(kept_for_backward(lambda: gated(gated_output_naive)(**inputs))) > rows * (inputs_kept + base + 4 * DIM)


def test_a_gate_before_a_projection_saves_neither_the_gate_nor_the_product_for_backward():
    inputs, rows = one_gate_inputs(2, 2000), 4000
    ours = kept_for_backward(lambda: gate_and_projection(gated_linear)(**inputs))
    naive = kept_for_backward(lambda: gate_and_projection(gated_linear_naive)(**inputs))
    assert sum(ours) <= rows * (DIM + 2 * WIDTH) + 1000
    assert sum(naive) > rows * (DIM + 4 * WIDTH)
