"""Sparse attention in blocks equals its definition in values and all gradients; dropout; precision; memory."""

import pytest
import torch

from mega_fairseq.ops.sparse import Sparsity, sparse_attention, sparse_attention_naive
from mega_fairseq.ops.sparse import parts as sparse_parts
from tests.ops.helpers import (
    assert_close,
    assert_same,
    noise,
    relative_error,
    with_gradients,
)

HEADS, WIDTH = 3, 4
SETS = ["first", "second", "merged", "heads"]
LENGTHS = [1, 3, 4, 5, 8, 13, 23]
PATTERNS = {
    "strided": Sparsity("strided", "merged", 4),
    "strided, stride 1": Sparsity("strided", "merged", 1),
    "fixed": Sparsity("fixed", "merged", 4, summary=1),
    "fixed, whole blocks": Sparsity("fixed", "merged", 4, summary=4),
    "fixed, subblocks": Sparsity("fixed", "merged", 5, summary=2, subblocks=2),
}
each_pattern = pytest.mark.parametrize("pattern", PATTERNS)
each_set = pytest.mark.parametrize("sets", SETS)
each_direction = pytest.mark.parametrize("causal", [True, False], ids=["causal", "all"])


@pytest.fixture
def small_tiles(monkeypatch):
    monkeypatch.setattr(sparse_parts, "TILE_SCORES", 12)
    monkeypatch.setattr(sparse_parts, "ROWS", 3)


def qkv(queries, keys, groups=2, heads=HEADS, width=WIDTH, dtype=torch.float64):
    sizes = {"q": queries, "k": keys, "v": keys}
    return {
        name: noise(groups, n, heads, width, seed=seed, dtype=dtype, grad=True)
        for seed, (name, n) in enumerate(sizes.items())
    }


def padding_of(groups, keys):
    """Pads anywhere, and a row of pads only."""
    columns = torch.arange(keys)
    return torch.stack([columns % 3 == 1, columns >= 0, columns >= keys // 2])[:groups]


def form(function, sparsity, **options):
    return lambda q, k, v: function(q, k, v, sparsity, **options)


def assert_equals_the_definition(sparsity, inputs, **options):
    ours = with_gradients(form(sparse_attention, sparsity, **options), inputs)
    assert_same(ours, with_gradients(form(sparse_attention_naive, sparsity, **options), inputs))
    return ours["output 0"]


@each_pattern
@each_set
@each_direction
@pytest.mark.parametrize("tiles", ["one tile", "small tiles"])
def test_values_and_all_gradients_equal_the_definition(request, pattern, sets, causal, tiles):
    if tiles == "small tiles":
        request.getfixturevalue("small_tiles")
    for length in LENGTHS:
        assert_equals_the_definition(PATTERNS[pattern]._replace(sets=sets, causal=causal), qkv(length, length))


@each_pattern
@each_set
def test_queries_may_be_the_last_places_only(pattern, sets, small_tiles):
    for queries, keys in ((1, 2), (1, 5), (3, 9), (4, 12), (2, 13), (9, 21), (20, 21)):
        assert_equals_the_definition(PATTERNS[pattern]._replace(sets=sets), qkv(queries, keys))


@each_pattern
@each_set
def test_pads_are_not_seen_and_rows_without_keys_give_zeros(pattern, sets, small_tiles):
    for length in (1, 4, 7, 13):
        inputs, padding = qkv(length, length, groups=3), padding_of(3, length)
        sparsity = PATTERNS[pattern]._replace(sets=sets, causal=False)
        assert not assert_equals_the_definition(sparsity, inputs, key_padding=padding)[1].any()


@pytest.mark.parametrize("pattern", ["fixed", "fixed, whole blocks", "fixed, subblocks"])
@each_set
def test_of_finished_blocks_only_the_summaries_are_needed(pattern, sets, small_tiles):
    sparsity = PATTERNS[pattern]._replace(sets=sets)
    stride, width = sparsity.stride, sparsity.summary * sparsity.subblocks
    for blocks, rest in ((1, 1), (1, stride), (2, 3), (3, stride + 2), (2, 3 * stride)):
        start = blocks * stride
        inputs = qkv(rest, start + rest)
        truth = with_gradients(form(sparse_attention_naive, sparsity), inputs)

        def ours(q, k, v, blocks=blocks, start=start):
            past = tuple(t[:, :start].unflatten(1, (blocks, stride))[:, :, stride - width :] for t in (k, v))
            return sparse_attention(q, k[:, start:], v[:, start:], sparsity, finished=past)

        assert_same(with_gradients(ours, inputs), truth)


@each_pattern
def test_gradients_with_dropout_are_those_of_finite_differences(pattern):
    def attend(*tensors):
        torch.manual_seed(1)
        return sparse_attention(*tensors, PATTERNS[pattern], dropout=0.4)

    assert torch.autograd.gradcheck(attend, list(qkv(7, 9, groups=1, heads=2, width=1).values()), fast_mode=True)


@each_pattern
@torch.no_grad()
def test_dropout_drops_weights_and_preserves_their_mean(pattern):
    torch.manual_seed(0)
    inputs = {name: t.expand(400, *t.shape[1:]) for name, t in qkv(13, 13, groups=1).items()}
    inputs["v"] = torch.ones_like(inputs["v"])
    draws = sparse_attention(**inputs, sparsity=PATTERNS[pattern], dropout=0.5)
    assert_close(draws.mean(0), torch.ones_like(draws[0]), "mean", rtol=0.0, atol=0.25)
    assert bool((draws == 0).any())
    assert bool((draws.std(0) > 0.1).all())


@pytest.mark.parametrize("pattern", ["strided", "fixed"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_at_8192_places_is_within_one_percent(pattern, dtype):
    sparsity = PATTERNS[pattern]._replace(stride=64)
    inputs = qkv(8192, 8192, groups=1, heads=2, width=16, dtype=dtype)
    exact = {name: t.detach().double().requires_grad_() for name, t in inputs.items()}
    ours = with_gradients(form(sparse_attention, sparsity), inputs)
    for name, truth in with_gradients(form(sparse_attention, sparsity), exact).items():
        assert ours[name].dtype == dtype
        assert relative_error(ours[name], truth) < 0.01, name


@each_pattern
@torch.no_grad()
def test_large_scores_are_not_rounded_in_bfloat16(pattern):
    inputs = {name: 3 * t.detach().bfloat16() for name, t in qkv(100, 100, width=64).items()}
    exact = sparse_attention_naive(*(t.double() for t in inputs.values()), PATTERNS[pattern])
    assert relative_error(sparse_attention(**inputs, sparsity=PATTERNS[pattern]), exact) < 2**-8  # as its output is


@each_pattern
def test_weights_and_gradients_are_exact_beside_scores_of_any_size(pattern):
    # Each query has the same score for all keys, exactly: a single product, since sums depend on their order.
    inputs = {name: 1e4 * t.detach().expand(-1, 29, -1, -1) for name, t in qkv(1, 1, width=1).items()}
    inputs["v"] = noise(2, 29, HEADS, 1, seed=3)
    for dtype, error in ((torch.float32, 1e-6), (torch.float64, 1e-14)):
        q, k, v = (t.to(dtype, copy=True).requires_grad_() for t in inputs.values())
        found, truth = (
            with_gradients(form(function, PATTERNS[pattern]), {"q": q, "k": k, "v": v})
            for function in (sparse_attention, sparse_attention_naive)
        )
        for name in ("output 0", "gradient of v"):
            assert relative_error(found[name], truth[name]) < error, name
        assert all(bool(found[name].isfinite().all()) for name in ("gradient of q", "gradient of k"))
