"""Attention in half precision: errors of outputs and gradients, compared with float64 on the same inputs; heads."""

import pytest
import torch

from mega_fairseq.ops import attention as ops
from mega_fairseq.ops.attention import ATTENTION_FUNCTIONS, attention, one_position
from mega_fairseq.ops.attention.one_position import (
    attend_at_one_position,
    head_weights_at_one_position,
    weighted_sum_by_head,
)
from tests.ops.helpers import Recorder, noise, relative_error, with_gradients

HALF = [torch.float16, torch.bfloat16]
WIDTH = 8


def tensors(queries, keys, values, bias=True, seed=0):
    """Numbers that are exact in float16 and in bfloat16."""
    given = {
        "q": noise(1, queries, WIDTH, seed=seed),
        "k": noise(1, keys, WIDTH, seed=seed + 1),
        "v": noise(1, keys, values, seed=seed + 2),
    }
    if bias:
        given["bias"] = noise(queries + keys - 1, seed=seed + 3) * 0.1
    return {name: t.bfloat16() for name, t in given.items()}


def in_dtype(given, dtype):
    return {name: t.detach().to(dtype).requires_grad_() for name, t in given.items()}


def chosen(function, causal):
    def attend(q, k, v, bias=None):
        return attention(q, k, v, function, causal, bias)

    return attend


def multiply_in_half(monkeypatch):
    """Makes the CPU multiply float16 in float16, like a GPU."""
    for module in (ops, one_position):
        monkeypatch.setattr(module, "product_dtype", lambda x, dtype: dtype)


CASES, NAMES = [(False, False), (True, True)], ["all", "causal, bias"]


@pytest.mark.slow
@pytest.mark.parametrize(("causal", "bias"), CASES, ids=NAMES)
@pytest.mark.parametrize("function", ATTENTION_FUNCTIONS)
def test_outputs_and_gradients_over_8192_keys_are_accurate_to_one_percent(function, causal, bias):
    given = tensors(8192, 8192, WIDTH + 4, bias)
    truth = with_gradients(chosen(function, causal), in_dtype(given, torch.float64))
    for dtype in HALF:
        results = with_gradients(chosen(function, causal), in_dtype(given, dtype))
        late = results["output 0"][:, -1024:]  # for causal relu2 they are a millionth of the first outputs
        assert relative_error(late, truth["output 0"][:, -1024:]) < 0.01, dtype
        for name, expected in truth.items():
            assert results[name].dtype == dtype
            assert relative_error(results[name], expected) < 0.01, (dtype, name)


@pytest.mark.parametrize(("causal", "bias"), CASES, ids=NAMES)
@pytest.mark.parametrize("function", ATTENTION_FUNCTIONS)
def test_products_in_float16_do_not_underflow(monkeypatch, function, causal, bias):
    given = tensors(600, 2048, WIDTH + 4, bias)
    truth = with_gradients(chosen(function, causal), in_dtype(given, torch.float64))
    multiply_in_half(monkeypatch)
    results = with_gradients(chosen(function, causal), in_dtype(given, torch.float16))
    for name, expected in truth.items():
        assert relative_error(results[name], expected) < 0.01, name


@torch.no_grad()
def test_weights_in_float16_do_not_overflow(monkeypatch):
    """relu2 of a score of 300 is beyond the range of float16, while outputs are within it."""
    given = tensors(5, 9, WIDTH + 4)
    given["v"], given["bias"] = given["v"] / 1000, given["bias"] + 300
    expected = chosen("relu2", True)(**in_dtype(given, torch.float64))
    for _ in range(2):
        assert relative_error(chosen("relu2", True)(**in_dtype(given, torch.float16)), expected) < 0.01
        multiply_in_half(monkeypatch)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("function", ATTENTION_FUNCTIONS)
@torch.no_grad()
def test_attention_at_one_position_over_8192_keys_is_accurate_to_one_percent(monkeypatch, function, dtype):
    given = tensors(1, 8192, 64, bias=False)
    expected = chosen(function, False)(**in_dtype(given, torch.float64))
    for _ in range(2):
        assert relative_error(chosen(function, False)(**in_dtype(given, dtype)), expected) < 0.01
        multiply_in_half(monkeypatch)


@pytest.mark.parametrize("function", ATTENTION_FUNCTIONS)
def test_autocast_runs_attention_in_half_precision_and_returns_float32_gradients(function):
    inputs = in_dtype(tensors(17, 17, WIDTH, bias=False), torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = chosen(function, True)(**inputs)
    assert y.dtype == torch.bfloat16
    gradients = torch.autograd.grad(y.float().square().sum(), list(inputs.values()))
    assert all(g.dtype == torch.float32 and g.isfinite().all() for g in gradients)


@pytest.mark.parametrize("values", [WIDTH + 4, WIDTH], ids=["tiled", "fused"])
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
def test_softmax_is_finite_for_scores_far_beyond_the_range_of_exp(causal, values):
    given = {name: t * 100 for name, t in tensors(17, 17, values).items()}
    results = with_gradients(chosen("softmax", causal), in_dtype(given, torch.float32))
    assert all(value.isfinite().all() for value in results.values())
    assert results["output 0"].abs().max() <= given["v"].abs().max() * 1.001


# ------------------------------------------------------------------------------------------- several heads


ROWS, HEADS = 3, 2


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "bias"])
@torch.no_grad()
def test_one_position_copies_neither_keys_nor_values(biased):
    keys = 512
    q, k, v = (noise(*shape, dtype=torch.float32) for shape in ((ROWS, 64), (ROWS, keys, 64), (ROWS, keys, 64)))
    bias = noise(HEADS, keys, dtype=torch.float32) if biased else None
    with Recorder() as recorder:
        attend_at_one_position(q, k, v, HEADS, bias)
        weighted_sum_by_head(head_weights_at_one_position(q, k, HEADS, bias), v)
    assert recorder.largest <= ROWS * HEADS * keys


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@torch.no_grad()
def test_one_position_over_8192_keys_is_accurate_to_one_percent_in_half_precision(dtype):
    given = [noise(1, 64), noise(1, 8192, 64, seed=1), noise(1, 8192, 64, seed=2), noise(HEADS, 8192, seed=3)]
    given = [t.bfloat16() for t in given]

    def forms(kind):
        q, k, v, bias = (t.to(kind) for t in given)
        weights = head_weights_at_one_position(q, k, HEADS, bias)
        return attend_at_one_position(q, k, v, HEADS, bias), weighted_sum_by_head(weights, v)

    for y, expected in zip(forms(dtype), forms(torch.float64)):
        assert y.dtype == dtype
        assert relative_error(y, expected) < 0.01
