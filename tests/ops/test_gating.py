"""The gates of Mega's output equal their definition in values and all gradients; precision; memory."""

import pytest
import torch

from mega_fairseq.ops.activations import ACTIVATIONS
from mega_fairseq.ops.gates import _gated_output
from mega_fairseq.ops.gates.projection import _gated_projection, gated_projection, gated_projection_naive
from mega_fairseq.ops.gates.tiles import TILE_ROWS
from tests.ops.gates import definition, fused, of_gated, shapes_of_gates
from tests.ops.helpers import assert_same, kept_for_backward, noise, relative_error, with_gradients

DIM, WIDTH = 3, 5
FORMS = (gated_projection, gated_projection_naive)
ROWS = [1, TILE_ROWS - 1, TILE_ROWS, TILE_ROWS + 1, 2 * TILE_ROWS + 3]


def inputs(batch, length, candidate=True, dtype=torch.float64, dim=DIM, width=WIDTH):
    shapes = shapes_of_gates(batch, length, dim, width, candidate)
    return {name: noise(*shape, seed=i, grad=True, dtype=dtype) for i, (name, shape) in enumerate(shapes.items())}


def assert_equals_the_definition(tensors, **options):
    ours = with_gradients(fused(**options), tensors)
    assert_same(ours, with_gradients(definition(**options), tensors))
    return ours


def mask(*shape):
    return noise(*shape, seed=50) > -0.5


own_or_cross = pytest.mark.parametrize("candidate", [True, False], ids=["own", "cross"])


@own_or_cross
@pytest.mark.parametrize(("rows", "activation"), [*((n, "silu") for n in ROWS), *((7, a) for a in ACTIVATIONS)])
def test_gates_equal_the_definition(rows, activation, candidate):
    assert_equals_the_definition(inputs(1, rows, candidate), activation=activation)


@own_or_cross
@pytest.mark.parametrize("shape", [(2, 1), (2, 7), (2, TILE_ROWS // 2 + 1), (2, TILE_ROWS + 1)])
def test_dropout_masks_the_candidate(shape, candidate):
    tensors = inputs(*shape, candidate)
    ours = assert_equals_the_definition(tensors, keep=mask(*shape, DIM), scale=1.5)
    assert not torch.equal(ours["output 0"], fused()(**tensors))


@own_or_cross
@pytest.mark.parametrize("shape", [(1, 1), (1, TILE_ROWS + 1), (2, 5), (3, TILE_ROWS // 2 + 1)])
def test_a_mask_of_channels_is_the_same_at_every_position(shape, candidate):
    tensors, keep = inputs(*shape, candidate), mask(shape[0], 1, DIM)
    everywhere = definition(keep=keep.expand(*shape, DIM), scale=1.5)
    assert_same(with_gradients(fused(keep=keep, scale=1.5), tensors), with_gradients(everywhere, tensors))


@own_or_cross
def test_the_operator_passes_the_checks_of_torch(candidate):
    """Shapes of fake tensors, gradients when traced, no aliases."""
    x, attended, residual, *weights = (t.detach().squeeze(0).requires_grad_() for t in inputs(1, 6, candidate).values())
    arguments = (x, attended, residual, *weights, mask(6, DIM), 1.5, "silu")
    torch.library.opcheck(_gated_output, arguments)


# -------------------------------------------------------------------------- values behind a gate, projected


def gated_inputs(rows, bias=True, values=True, dtype=torch.float64):
    """x, v, and the weights of both projections."""
    shapes = {
        "x": (rows, 4),
        "values": (rows, WIDTH),
        "gate": (WIDTH, 4),
        "gate_bias": (WIDTH,),
        "weight": (DIM, WIDTH),
    }
    shapes.update({"bias": (DIM,)} if bias else {})
    if not values:
        del shapes["values"]
    return {name: noise(*shape, seed=i, grad=True, dtype=dtype) for i, (name, shape) in enumerate(shapes.items())}


with_or_without_values = pytest.mark.parametrize("values", [True, False], ids=["values", "no values"])


@with_or_without_values
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize(
    ("rows", "activation"), [*((n, "silu") for n in [0, *ROWS]), *((TILE_ROWS + 7, a) for a in ACTIVATIONS)]
)
def test_a_gated_projection_equals_its_definition(rows, activation, bias, values):
    tensors = gated_inputs(rows, bias, values)
    results = (with_gradients(of_gated(form, activation), tensors) for form in FORMS)
    assert_same(*results)


@with_or_without_values
def test_the_operator_of_gated_projections_passes_the_checks_of_torch(values):
    x, behind, *weights = gated_inputs(6).values()
    torch.library.opcheck(_gated_projection, (x, behind if values else None, *weights, "gelu"))


@with_or_without_values
def test_a_gated_projection_saves_the_gate_once(values):
    tensors, rows, given = gated_inputs(4000, values=values), 4000, 4 + WIDTH * values
    saved = {form: sum(kept_for_backward(lambda f=form: of_gated(f)(**tensors))) for form in FORMS}
    assert saved[gated_projection] <= rows * (given + WIDTH) + 1000
    assert saved[gated_projection_naive] >= rows * (given + (3 if values else 2) * WIDTH)


# ------------------------------------------------------------------------------- precision, memory


@pytest.mark.parametrize("projection", [False, True], ids=["gates", "gated projection"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_keeps_the_dtypes_of_residual_and_gradients(dtype, projection):
    exact, options = gated_inputs(9) if projection else inputs(2, 9), {"keep": mask(2, 9, DIM), "scale": 1.5}
    ours, truth = map(of_gated, FORMS) if projection else (fused(**options), definition(**options))
    tensors = {name: t.detach().to(dtype).requires_grad_() for name, t in exact.items()}
    with torch.autocast("cpu", torch.bfloat16):
        y = ours(**tensors)
    assert y.dtype == (torch.bfloat16 if projection else dtype)
    assert relative_error(y, truth(**exact)) < 0.02
    gradients = torch.autograd.grad(y.float().sum(), list(tensors.values()))
    assert all(g.dtype == dtype and g.isfinite().all() for g in gradients)


@pytest.mark.parametrize("form", [fused, definition])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_closed_update_gate_returns_the_residual_unchanged_under_autocast(dtype, form):
    tensors = {name: t.detach() for name, t in inputs(2, 9, dtype=torch.float32).items()}
    tensors["weight"][:DIM], tensors["bias"][:DIM] = 0.0, -1e4
    with torch.autocast("cpu", dtype):
        assert torch.equal(form()(**tensors), tensors["residual"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_gradients_over_16384_rows_are_as_exact_as_plain_ones(dtype):
    """With sums over tiles of 512 rows in half precision, the error would be up to 2.4 times as large."""
    rounded = {n: t.detach().to(dtype).requires_grad_() for n, t in inputs(1, 16384, dim=16, width=24).items()}
    exact = {name: t.detach().double().requires_grad_() for name, t in rounded.items()}
    truth, plain = with_gradients(definition(), exact), with_gradients(definition(), rounded)
    for name, ours in with_gradients(fused(), rounded).items():
        assert relative_error(ours, truth[name]) < 1.25 * relative_error(plain[name], truth[name]), name


def test_gates_save_only_one_projection_of_the_input_for_backward():
    tensors, rows, base = inputs(2, 2000), 4000, DIM + WIDTH + DIM
    inputs_kept = DIM + WIDTH + DIM
    assert sum(kept_for_backward(lambda: fused()(**tensors))) <= rows * (inputs_kept + base) + 1000
    assert sum(kept_for_backward(lambda: definition()(**tensors))) > rows * (inputs_kept + base + 3 * DIM)
