"""Tests of the Triton kernels in Triton's interpreter: `test_triton.py` runs them in a process of their own."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from mega_fairseq.modules import (
    CrossAttentionState,
    DampedEMA,
    GatedCrossAttention,
    GatedCrossAttentionConfig,
    normalization,
    position_bias,
)
from mega_fairseq.modules.normalization import SequenceNorm
from mega_fairseq.modules.position_bias import POSITION_BIASES, TabledBias, attend_token
from mega_fairseq.ops import backend, rows
from mega_fairseq.ops import norm as norms
from mega_fairseq.ops.attention import position, tile_kernels, tile_weights, tiles
from mega_fairseq.ops.attention.fixed import FixedKeyValues, FixedPlace
from mega_fairseq.ops.attention.rotary import rotary_distances, rotary_distances_naive
from mega_fairseq.ops.cema import cema, cema_coefficients, cema_naive, cema_token
from mega_fairseq.ops.dense import dense, dense_naive
from mega_fairseq.ops.dense import triton as dense_triton
from mega_fairseq.ops.ema import ema, ema_coefficients, ema_naive, ema_token
from mega_fairseq.ops.ema import triton as ema_triton
from mega_fairseq.ops.ema.naive import ema_coefficients_naive
from mega_fairseq.ops.gates import gate_output, gated_output, gated_output_naive
from mega_fairseq.ops.gates.naive import gate_output_naive
from mega_fairseq.ops.norm import normalized, normalized_naive
from mega_fairseq.ops.norm import triton as norm_triton
from mega_fairseq.ops.queries_keys import queries_keys, queries_keys_naive
from mega_fairseq.ops.timestep_norm import Statistics, no_statistics, timestep_norm, timestep_norm_naive
from mega_fairseq.ops.timestep_norm import triton as timestep_norm_triton
from tests.ops import test_attention_precision as precision
from tests.ops.helpers import assert_same, noise, relative_error, with_gradients

BATCH, DIM, NDIM = 3, 33, 3  # more channels than a warp has lanes, and a number of states that is padded
NAMES = ("alpha", "delta", "beta", "eta")
SHORT = 4  # steps of a segment


@pytest.fixture(autouse=True)
def kernels_everywhere(monkeypatch):
    monkeypatch.setenv("MEGA_BACKEND", "triton")
    monkeypatch.setattr(ema_triton, "SEGMENT", SHORT)
    monkeypatch.setattr(ema_triton, "PARTS", 4)
    monkeypatch.setattr(rows, "PARTS", 3)
    backend._choose.cache_clear()
    yield
    backend._choose.cache_clear()


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

    ours, truth = (with_gradients(first(function), inputs("segments")) for function in (kernels, definition))
    assert_same(ours, truth)


def test_a_skip_in_half_precision_has_a_gradient_in_its_dtype():
    tensors = {**inputs("segments"), "skip": noise(DIM, seed=12).half().requires_grad_()}
    ours, truth = (with_gradients(function, tensors)["gradient of skip"] for function in (kernels, definition))
    assert ours.dtype == torch.float16
    torch.testing.assert_close(ours, truth, rtol=2**-10, atol=0)


def test_a_gradient_that_does_not_cross_segments_is_detected(monkeypatch):
    gradients = ema_triton._coefficient_gradients
    monkeypatch.setattr(ema_triton, "_coefficient_gradients", lambda *a, BACK: gradients(*a[:5], None, a[6], BACK=BACK))
    with pytest.raises(AssertionError, match="gradient of"):
        test_kernels_equal_the_definition_in_values_and_gradients("segments")


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


@pytest.mark.parametrize("activation", ["silu", "linear", "relu"])
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 37, 5), (3, 300, 33), (0, 4, 3)], ids=str)
def test_a_projection_equals_its_definition_in_values_and_gradients(shape, activation):
    *batch, width = shape
    tensors = {"x": noise(*batch, 3, seed=1), "weight": noise(width, 3, seed=2), "bias": noise(width, seed=3)}
    tensors = {name: t.requires_grad_() for name, t in tensors.items()}
    results = (with_gradients(partial(form, activation=activation), tensors) for form in (dense, dense_naive))
    assert_same(*results)


def test_rows_that_a_sum_leaves_out_are_detected(monkeypatch):
    monkeypatch.setattr(dense_triton, "add_parts", lambda parts, dtype: parts[:-1].sum(0).to(dtype))
    with pytest.raises(AssertionError, match="gradient of bias"):
        test_a_projection_equals_its_definition_in_values_and_gradients((3, 300, 33), "silu")


@pytest.mark.parametrize("parameters", [(), ("weight",), ("weight", "bias")], ids=str)
@pytest.mark.parametrize("center", [True, False], ids=["layer norm", "rms norm"])
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 37, 5), (3, 300, 33), (4, 1100), (0, 4, 3)], ids=str)
def test_a_norm_equals_its_definition_in_values_and_gradients(shape, center, parameters):
    x = (3.0 + noise(*shape, seed=1)).requires_grad_()
    tensors = {"x": x, **{name: noise(shape[-1], seed=i, grad=True) for i, name in enumerate(parameters)}}

    def run(form):
        return with_gradients(lambda x, weight=None, bias=None: form(x, weight, bias, 1e-5, center), tensors)

    assert_same(run(normalized), run(normalized_naive))


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 37, 5), (3, 700, 6), (0, 4, 3)], ids=str)
@pytest.mark.parametrize("activation", ["silu", "linear"])
@pytest.mark.parametrize("used", [slice(2), slice(1), slice(1, 2)], ids=["both", "queries", "keys"])
def test_queries_and_keys_equal_the_definition_in_values_and_gradients(shape, used, activation):
    names = {"before": shape, "kappa": (2, shape[-1]), "mu": (2, shape[-1])}
    tensors = {name: noise(*size, seed=i, grad=True) for i, (name, size) in enumerate(names.items())}

    def run(form):
        return with_gradients(lambda **t: form(**t, activation=activation)[used], tensors)

    assert_same(run(queries_keys), run(queries_keys_naive))


@pytest.mark.parametrize("width", [6, 10])
@pytest.mark.parametrize(
    ("shape", "positions"),
    [
        *[((5, 300), (300,)), ((3, 7), (3, 7)), ((2, 3, 7), (3, 7)), ((0, 4), (4,))],
        *[((3, 7, 4), (7, 1)), ((3, 7, 4), (3, 7, 1)), ((3, 1, 4), (3, 1, 1))],  # four heads
    ],
)
def test_rotations_equal_the_definition_in_values_and_gradients(shape, positions, width):
    places = torch.randint(-9, 10**6, positions, generator=torch.Generator().manual_seed(1))
    tensors = {"x": noise(*shape, width, seed=1, grad=True)}

    def run(tables, turned):
        return with_gradients(lambda x: turned(x, *tables(places, 6, x.dtype)), tensors)

    assert_same(run(position.cos_sin, position.turned), run(position.cos_sin_naive, position.turned_naive))


@pytest.mark.parametrize(("first", "stop"), [(0, 1), (-4, 7), (-1500, 3)])
@pytest.mark.parametrize("width", [2, 12])
def test_rotary_distances_equal_the_definition_in_values_and_gradients(first, stop, width):
    tensors = {name: noise(width, seed=i, grad=True) for i, name in enumerate("ab")}

    def run(form):
        return with_gradients(lambda **t: form(**t, first=first, stop=stop), tensors)

    assert_same(run(rotary_distances), run(rotary_distances_naive))


GROUPS, QUERIES, KEYS, HEADS = 4, 5, 7, 2
FUNCTIONS = ["softmax", "relu2", "laplace", "relu2, outer"]
LAST_KEYS_PADDED = torch.arange(KEYS) >= torch.tensor([[KEYS], [3], [0], [1]])
ALL = {"bias", "multiplier", "padding", "keep", "rows", "causal"}
OPTIONS = [set(), {"bias", "causal"}, {"padding", "keep"}, {"multiplier", "rows", "causal"}, ALL - {"causal"}, ALL]


def attended(options, function, dtype=torch.float64):
    """Attention in tiles of few rows, or one; the last rows of `padding` see few keys or none."""
    tensors = {"v": noise(GROUPS, KEYS, 6, seed=1), "q": noise(GROUPS, QUERIES, 4, seed=2)}
    tensors["k"] = noise(GROUPS, KEYS, 4, seed=3)
    for seed, name in enumerate(sorted(options & {"bias", "multiplier"})):
        tensors[name] = noise(HEADS, QUERIES + KEYS - 1, seed=4 + seed)
    tensors = {name: t.to(dtype).requires_grad_() for name, t in tensors.items()}
    padding = LAST_KEYS_PADDED if "padding" in options else None
    keep = noise(GROUPS, QUERIES, KEYS, seed=6) > -0.5 if "keep" in options else None
    name, *outer = function.split(", ")

    def attend(v, q, k, bias=None, multiplier=None):
        args = (v, q, k, bias, multiplier, padding, keep, 1.4, name, "causal" in options, bool(outer), 0.5)
        return tiles.tiled_attention(*args)

    return with_gradients(attend, tensors)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ", ".join(sorted(options)) or "none")
def test_tiles_with_weights_by_kernels_equal_those_with_plain_ones(options, function, monkeypatch):
    monkeypatch.setattr(tile_kernels, "ELEMENTS", 4)  # fewer than keys
    if "rows" in options:
        monkeypatch.setattr(tiles, "TILE_ROWS", 2)
    ours = attended(options, function)
    monkeypatch.setattr(tiles, "_form", lambda x: tile_weights)
    assert_same(ours, attended(options, function))


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_by_kernels_are_as_accurate_in_half_precision_as_plain_ones(dtype, function, monkeypatch):
    ours = attended({"bias", "causal"}, function, dtype)
    monkeypatch.setattr(tiles, "_form", lambda x: tile_weights)
    for name, expected in attended({"bias", "causal"}, function, dtype).items():
        assert ours[name].dtype == dtype
        assert relative_error(ours[name], expected.double()) < 4 * torch.finfo(dtype).eps


test_weights_in_float16_do_not_overflow = precision.test_weights_in_float16_do_not_overflow  # nor those by kernels


def test_a_gradient_of_the_weights_that_forgets_its_mean_is_detected(monkeypatch):
    def gradients(x, tile, scores, grad, seen):
        plain = tile_weights.gradients(x, tile, scores.clone(), grad.clone(), seen)
        return plain[0], plain[0] * grad, plain[2]

    monkeypatch.setattr(tile_kernels, "gradients", gradients)
    with pytest.raises(AssertionError, match="gradient of"):
        test_tiles_with_weights_by_kernels_equal_those_with_plain_ones(set(), "softmax", monkeypatch)


@pytest.mark.parametrize("lengths", [None, torch.tensor([9, 0, 4])], ids=["no pads", "pads"])
@pytest.mark.parametrize("parameters", [(), ("weight", "bias")], ids=str)
@pytest.mark.parametrize("length", [9, 1, 12])
def test_a_timestep_norm_equals_its_definition_in_values_and_gradients(length, parameters, lengths, monkeypatch):
    monkeypatch.setattr(timestep_norm_triton, "TILE", 16)  # four tokens of four channels
    shapes = {"x": (BATCH, length, 8), "mean": (BATCH, 2), "var": (BATCH, 2), **dict.fromkeys(parameters, (8,))}
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
    monkeypatch.setattr(norms, "kernel_runs", lambda x: False)
    monkeypatch.setattr(normalization, "kernel_runs", lambda x: False)
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
    total = dim + width + dim * hidden
    shapes = {
        "gate_input": (2, length, dim), "attended": (2, length, width), "residual": (2, length, dim),
        "weight": (total, dim), "bias": (total,), "output": (dim, width), "output_bias": (dim,),
    }  # fmt: skip
    # Every other column of a wider tensor: the kernels read contiguous rows.
    tensors = {
        name: noise(*shape[:-1], 2 * shape[-1], seed=i)[..., ::2].requires_grad_()
        for i, (name, shape) in enumerate(shapes.items())
    }
    keep = (noise(2, length, 2 * dim, seed=20) > -0.5)[..., ::2] if dropped else None

    def fused(gate_input, attended, residual, weight, bias, output, output_bias):
        gates = ((weight, bias), (output, output_bias))
        return gated_output(gate_input, attended, residual, *gates, "silu", keep, 1.0 / math.sqrt(2))

    def definition(gate_input, attended, residual, weight, bias, output, output_bias):
        gates = (partial(F.linear, weight=w, bias=b) for w, b in ((weight, bias), (output, output_bias)))
        return gated_output_naive(gate_input, attended, residual, *gates, "silu", keep, 1.0 / math.sqrt(2))

    assert_same(with_gradients(fused, tensors), with_gradients(definition, tensors))


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


@torch.no_grad()
@pytest.mark.parametrize("own", [True, False], ids=["own", "cross"])
def test_gates_of_single_tokens_equal_the_definition(own):
    projected = noise(5, 60, seed=1)
    update, reset, candidate = projected[:, 2:9], projected[:, 9:20], projected[:, 20:27]
    attended, residual, weight = noise(5, 11, seed=2), noise(5, 7, seed=3), noise(7, 11, seed=4)
    args = (update, reset, candidate if own else None, attended, residual, lambda x: x @ weight.t())
    torch.testing.assert_close(gate_output(*args), gate_output_naive(*args), rtol=1e-9, atol=1e-9)


ROWS, CAPACITY, WIDTH, VALUES = 6, 70, 4, 150  # more keys, and wider values, than a program has at once


def in_fixed_storage(position):
    """Keys and values of rows that continued others, and the next token: arguments of `attend_token`."""
    keys, values = noise(ROWS, CAPACITY, WIDTH, seed=1), noise(ROWS, CAPACITY, VALUES, seed=2)
    rows = torch.randint(ROWS, (ROWS, CAPACITY), generator=torch.Generator().manual_seed(3))
    rows[:, position] = torch.arange(ROWS)
    place = FixedPlace(torch.tensor(position), CAPACITY, rows)
    q, k, v = (noise(ROWS, 2 * width, seed=i)[:, :width] for i, width in enumerate((WIDTH, WIDTH, VALUES)))
    return q, k, v, FixedKeyValues(keys, values, place)


@torch.no_grad()
@pytest.mark.parametrize("position", [0, 1, 37, CAPACITY - 1])
@pytest.mark.parametrize("function", ["softmax", "relu2", "laplace", "relu2, outer"])
@pytest.mark.parametrize("bias", ["none", "simple", "rotary"])
def test_attention_in_fixed_storage_equals_the_plain_form(bias, function, position, monkeypatch):
    torch.manual_seed(0)
    table = TabledBias(POSITION_BIASES[bias](WIDTH, CAPACITY, True).double())

    def run():
        args = in_fixed_storage(position)
        y, _ = attend_token(*args, table, function.split(",")[0], None, "outer" in function)
        return y, *args[-1][:2]

    ours = run()
    monkeypatch.setattr(position_bias, "kernel_runs", lambda q: False)
    torch.testing.assert_close(ours, run(), rtol=1e-9, atol=1e-9)


@torch.no_grad()
@pytest.mark.parametrize("function", ["softmax", "relu2", "laplace"])
def test_cross_attention_in_fixed_storage_equals_the_plain_form(function, monkeypatch):
    torch.manual_seed(0)
    module = GatedCrossAttention(GatedCrossAttentionConfig(6, shared_dim=4, attention=function)).double().eval()
    padding = torch.arange(CAPACITY) >= torch.tensor([[CAPACITY], [33]])
    place = FixedPlace(torch.tensor(5), 64, torch.zeros(ROWS, 64, dtype=torch.long))
    state = CrossAttentionState(noise(2, CAPACITY, 4, seed=1), noise(2, CAPACITY, 6, seed=2), padding, place)

    def run():
        return module.step()(noise(ROWS, 1, 6), None, state, None, None, None)[0]

    ours = run()
    monkeypatch.setattr(position_bias, "kernel_runs", lambda q: False)
    torch.testing.assert_close(ours, run(), rtol=1e-9, atol=1e-9)
