"""The kernels of queries, keys, positions and attention equal their definitions."""

import pytest
import torch

from mega_fairseq.modules import (
    CrossAttentionState,
    GatedCrossAttention,
    GatedCrossAttentionConfig,
)
from mega_fairseq.modules.position_bias import POSITION_BIASES, TabledBias, attend_token
from mega_fairseq.ops.attention import fixed, position, tile_kernels, tile_weights, tiles
from mega_fairseq.ops.attention.fixed import FixedKeyValues, FixedPlace
from mega_fairseq.ops.queries_keys import queries_keys, queries_keys_naive
from tests.ops import test_attention_precision as precision
from tests.ops.helpers import assert_same, noise, relative_error, with_gradients

BOTH, ONE = slice(2), [((2, 37, 5), slice(1)), ((2, 37, 5), slice(1, 2))]  # queries or keys


@pytest.mark.parametrize("activation", ["silu", "linear"])
@pytest.mark.parametrize(
    ("shape", "used"), [*((s, BOTH) for s in ((1, 1, 1), (2, 37, 5), (3, 700, 6), (0, 4, 3))), *ONE], ids=str
)
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

    assert_same(run(position.rotary_distances), run(position.rotary_distances_naive))


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
    monkeypatch.setattr(tiles.FORMS, "triton", None)
    assert_same(ours, attended(options, function))


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_by_kernels_are_as_accurate_in_half_precision_as_plain_ones(dtype, function, monkeypatch):
    ours = attended({"bias", "causal"}, function, dtype)
    monkeypatch.setattr(tiles.FORMS, "triton", None)
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


ROWS, CAPACITY, WIDTH, VALUES = 6, 70, 4, 150  # more keys, and wider values, than a program has at once


def in_fixed_storage(position):
    """Keys and values of rows that continued others, and the next token: arguments of `attend_token`."""
    keys, values = noise(ROWS, CAPACITY, WIDTH, seed=1), noise(ROWS, CAPACITY, VALUES, seed=2)
    rows = torch.randint(ROWS, (ROWS, CAPACITY), generator=torch.Generator().manual_seed(3))
    rows[:, position] = torch.arange(ROWS)
    place = FixedPlace(torch.tensor(position), CAPACITY, rows)
    q, k, v = (noise(ROWS, 2 * width, seed=i)[:, :width] for i, width in enumerate((WIDTH, WIDTH, VALUES)))
    return q, k, v, FixedKeyValues(keys, values, place)


IN_STORAGE = [("rotary", function, position) for function in FUNCTIONS for position in (0, 37)]
IN_STORAGE += [(bias, "softmax", position) for bias in ("none", "simple") for position in (1, CAPACITY - 1)]


@torch.no_grad()
@pytest.mark.parametrize(("bias", "function", "position"), IN_STORAGE)
def test_attention_in_fixed_storage_equals_the_plain_form(bias, function, position, monkeypatch):
    torch.manual_seed(0)
    table = TabledBias(POSITION_BIASES[bias](WIDTH, CAPACITY, True).double())

    def run():
        args = in_fixed_storage(position)
        y, _ = attend_token(*args, table, function.split(",")[0], None, "outer" in function)
        return y, *args[-1][:2]

    ours = run()
    monkeypatch.setattr(fixed.attend_in_storage, "triton", None)
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
    monkeypatch.setattr(fixed.attend_in_storage, "triton", None)
    torch.testing.assert_close(ours, run(), rtol=1e-9, atol=1e-9)
