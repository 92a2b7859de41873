"""Log-probabilities in slices equal those of the whole vocabulary at once, with less memory."""

import pytest
import torch

from mega_fairseq.ops import log_probs as ops
from mega_fairseq.ops.log_probs import target_log_probs, target_log_probs_naive
from tests.ops.helpers import assert_close, assert_same, kept_for_backward, noise, with_gradients

# tokens, width, sizes of tables: no token, one type, one table, several, many types
SHAPES = [(0, 3, [5]), (1, 3, [1]), (7, 4, [11]), (300, 3, [6, 2]), (260, 2, [32_773, 3])]


def tables(width, sizes, dtype=torch.float64, grad=True):
    return [noise(size, width, seed=i + 1, dtype=dtype, grad=grad) for i, size in enumerate(sizes)]


def targets_of(tokens, sizes):
    """Random types, including the first and the last one."""
    last = sum(sizes) - 1
    chosen = torch.randint(0, last + 1, (tokens,), generator=torch.Generator().manual_seed(3))
    chosen[:1], chosen[1:2] = last, 0
    return chosen


def inputs(tokens, width, sizes, **options):
    x = noise(tokens, width, **options)
    weights = tables(width, sizes, **options)
    return {"x": x, **{f"table {i}": weight for i, weight in enumerate(weights)}}


def scored(function, targets):
    return lambda x, bias=None, **weights: function(x, list(weights.values()), targets, bias)


@pytest.mark.parametrize(("tokens", "width", "sizes"), SHAPES)
@pytest.mark.parametrize("scores", [1, 64])
def test_slices_equal_the_whole_in_values_and_gradients(monkeypatch, tokens, width, sizes, scores):
    monkeypatch.setattr(ops, "SCORES", scores * max(1, sum(sizes) // 100))
    given, targets = inputs(tokens, width, sizes, grad=True), targets_of(tokens, sizes)
    if scores == 64:
        given["bias"] = noise(sum(sizes), grad=True)
    truth = with_gradients(scored(target_log_probs_naive, targets), given)
    assert_same(with_gradients(scored(target_log_probs, targets), given), truth)
    with torch.no_grad():
        assert_close(scored(target_log_probs, targets)(**given), truth["output 0"])


@torch.no_grad()
def test_a_score_far_above_all_others_is_not_a_nan():
    x, weight = torch.full((2, 1), 1e4), torch.tensor([[1.0], [-1.0], [0.0]])
    found = target_log_probs(x, [weight[:2], weight[2:]], torch.tensor([0, 1]))
    assert_close(found, torch.tensor([0.0, -2e4]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_scores_are_summed_in_float32(dtype):
    x, (weight,) = noise(40, 8, dtype=dtype), tables(8, [700], dtype, grad=False)
    targets = targets_of(40, [700])
    truth = target_log_probs_naive(x.double(), [weight.double()], targets)
    with torch.no_grad():
        found = target_log_probs(x, [weight], targets)
    assert found.dtype == torch.float32
    assert (found - truth).abs().max() < 16 * torch.finfo(dtype).eps  # scores of up to 10, rounded once


def test_scores_of_slices_are_not_saved_for_backward(monkeypatch):
    monkeypatch.setattr(ops, "SCORES", 4096)
    x, weights = noise(900, 4, grad=True), tables(4, [500, 3])
    targets = targets_of(900, [500, 3])
    assert max(kept_for_backward(lambda: target_log_probs(x, weights, targets))) <= 900 * 4
    monkeypatch.setattr(ops, "checkpoint", lambda function, *given, **how: function(*given))
    assert max(kept_for_backward(lambda: target_log_probs(x, weights, targets))) > 900 * 4
