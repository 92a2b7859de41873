"""Toeplitz products equal their definition in values and all gradients; precision; memory."""

import pytest
import torch

from mega_fairseq.ops import toeplitz as ops
from mega_fairseq.ops.toeplitz import toeplitz, toeplitz_naive
from tests.ops.helpers import Recorder, assert_same, kept_for_backward, noise, relative_error, with_gradients

GROUPS, HEADS, WIDTH = 3, 2, 4
SHAPES = [(1, 1), (1, 7), (2, 2), (5, 9), (16, 17), (17, 17), (31, 64)]
PARTS = [(), ("rows",), ("keys",), ("bias",), ("rows", "keys", "bias")]
HALF = [torch.float16, torch.bfloat16]

every_direction = pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])


def inputs_of(queries, keys, parts=PARTS[-1], groups=GROUPS, dtype=torch.float64):
    shapes = {
        "v": (groups, keys, HEADS * WIDTH),
        "weight": (HEADS, queries + keys - 1),
        "rows": (HEADS, queries),
        "keys": (HEADS, keys),
        "bias": (HEADS, queries),
    }
    wanted = ("v", "weight", *parts)
    return {name: noise(*shapes[name], seed=i, dtype=dtype, grad=True) for i, name in enumerate(wanted)}


def with_direction(form, causal):
    return lambda **inputs: form(**inputs, causal=causal)


@every_direction
@pytest.mark.parametrize(
    ("parts", "rows"), [*((parts, ops.BLOCK_ROWS) for parts in PARTS), *((PARTS[-1], n) for n in (1, 4, 16, 1000))]
)
def test_products_in_blocks_of_any_size_equal_the_definition_in_values_and_gradients(monkeypatch, parts, rows, causal):
    monkeypatch.setattr(ops, "BLOCK_ROWS", rows)
    for queries, keys in SHAPES:
        inputs = inputs_of(queries, keys, parts)
        ours = with_gradients(with_direction(toeplitz, causal), inputs)
        assert_same(ours, with_gradients(with_direction(toeplitz_naive, causal), inputs))


@every_direction
def test_no_matrix_of_queries_times_keys_is_created_or_kept_for_backward(causal):
    size = 2048
    inputs = inputs_of(size, size, groups=1, dtype=torch.float32)
    assert max(kept_for_backward(lambda: toeplitz(**inputs, causal=causal))) <= size * HEADS * WIDTH
    with Recorder() as recorder:
        toeplitz(**inputs, causal=causal).sum().backward()
    assert recorder.largest <= size * size // 4


@pytest.mark.parametrize("size", [300, pytest.param(8192, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_half_precision_is_accurate_to_one_percent_with_weights_that_underflow(monkeypatch, dtype, size):
    """Also with products in float16, as on a GPU; the CPU multiplies float16 in float32."""
    given = {name: t.detach().bfloat16().float() for name, t in inputs_of(size, size, groups=2).items()}
    del given["bias"]  # it would be much larger than the sums
    given["weight"] *= 1e-5 * size**-0.5  # sums are about 1e-5, terms are subnormal in float16
    given["v"] = given["v"].to(dtype)
    run = with_direction(toeplitz, True)
    truth = with_gradients(run, {name: t.double().requires_grad_() for name, t in given.items()})
    for _ in range(2):
        results = with_gradients(run, {name: t.clone().requires_grad_() for name, t in given.items()})
        assert results["output 0"].dtype == dtype
        for name, expected in truth.items():
            assert relative_error(results[name], expected) < 0.01, name
        monkeypatch.setattr(ops, "product_dtype", lambda x, dtype: dtype)
