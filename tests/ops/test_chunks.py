"""Attention within chunks: any length, any split, carried caches."""

import pytest
import torch

from mega_fairseq.ops.attention import attention
from mega_fairseq.ops.attention.chunks import causal_chunked, chunked
from tests.helpers.golden_checks import pieces
from tests.ops.helpers import assert_same, noise, with_gradients

CHUNK, WIDTH, VALUES = 4, 3, 5
LENGTHS = [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 11, 13]
CHUNKS = [1, 2, CHUNK, 100, None]


def qkv(length, batch=3, seed=0):
    sizes = {"q": WIDTH, "k": WIDTH, "v": VALUES}
    return {n: noise(batch, length, s, seed=seed + i, grad=True) for i, (n, s) in enumerate(sizes.items())}


def attend(causal):
    """With a bias over distances, so that a wrong alignment of queries and keys changes the outputs."""

    def run(q, k, v, padding):
        bias = noise(100, seed=9)[51 - k.size(1) : 50 + q.size(1)]
        return attention(q, k, v, "laplace", causal, bias, padding)

    return run


def one_chunk_after_the_other(run, chunk_size):
    """The definition: split, attend, concatenate."""

    def function(q, k, v, padding=None):
        size = q.size(1) if chunk_size is None else chunk_size
        parts = []
        for start in range(0, q.size(1), size):
            cut = slice(start, start + size)
            parts.append(run(q[:, cut], k[:, cut], v[:, cut], None if padding is None else padding[:, cut]))
        return torch.cat(parts, 1)

    return function


@pytest.mark.parametrize("mask", ["none", "causal", "pads"])
@pytest.mark.parametrize("chunk_size", CHUNKS)
@pytest.mark.parametrize("length", LENGTHS)
def test_a_sequence_of_any_length_attends_inside_its_chunks_in_values_and_all_gradients(length, chunk_size, mask):
    padding = torch.arange(length) >= torch.tensor([[length], [(length + 1) // 2], [0]]) if mask == "pads" else None
    run, inputs = attend(mask == "causal"), qkv(length)
    ours = with_gradients(lambda q, k, v: chunked(run, q, k, v, chunk_size, padding), inputs)
    truth = one_chunk_after_the_other(run, chunk_size)
    assert_same(ours, with_gradients(lambda q, k, v: truth(q, k, v, padding), inputs))


def in_pieces(inputs, sizes, chunk_size):
    """Outputs and caches after each piece."""
    cache, outputs, caches = None, [], []
    for start, stop in pieces(inputs["q"].size(1), sizes):
        q, k, v = (inputs[name][:, start:stop].clone() for name in "qkv")
        y, cache = causal_chunked(attend(True), q, k, v, chunk_size, cache)
        outputs.append(y)
        caches.append(cache)
    return outputs, caches


@pytest.mark.parametrize("sizes", [[1], [2], [3, 5, 1], [4], [7, 6], [12, 1], [13]])
@pytest.mark.parametrize("chunk_size", CHUNKS)
def test_any_split_gives_the_outputs_and_gradients_of_the_whole_sequence(chunk_size, sizes):
    inputs = qkv(13)
    ours = with_gradients(lambda **i: torch.cat(in_pieces(i, sizes, chunk_size)[0], 1), inputs)
    truth = one_chunk_after_the_other(attend(True), chunk_size)
    assert_same(ours, with_gradients(truth, inputs))


@pytest.mark.parametrize("sizes", [[1], [3, 5, 1], [4], [13]])
@pytest.mark.parametrize("chunk_size", CHUNKS)
def test_a_cache_contains_only_the_unfinished_chunk(chunk_size, sizes):
    inputs = qkv(13)
    _, caches = in_pieces(inputs, sizes, chunk_size)
    for cache, (_, stop) in zip(caches, pieces(13, sizes)):
        start = 0 if chunk_size is None else stop - stop % chunk_size
        assert cache.padding is None
        assert torch.equal(cache.keys, inputs["k"][:, start:stop])
        assert torch.equal(cache.values, inputs["v"][:, start:stop])
        if chunk_size is not None:  # a view would keep the whole piece alive
            assert cache.keys.untyped_storage().nbytes() <= 3 * chunk_size * WIDTH * 8


@pytest.mark.parametrize("chunk_size", CHUNKS)
def test_a_cache_of_rows_at_different_positions_contains_each_unfinished_chunk_and_masks_the_rest(chunk_size):
    lengths, inputs = torch.tensor([9, 4, 0]), qkv(9)
    _, cache = causal_chunked(attend(True), inputs["q"], inputs["k"], inputs["v"], chunk_size, None, lengths)
    for row, length in enumerate(lengths.tolist()):
        start = 0 if chunk_size is None else length - length % chunk_size
        assert (~cache.padding[row]).sum() == length - start
        assert torch.equal(cache.keys[row, : length - start], inputs["k"][row, start:length])
        assert torch.equal(cache.values[row, : length - start], inputs["v"][row, start:length])
        assert not cache.keys[row, length - start :].any()
    assert chunk_size is None or cache.keys.size(1) < chunk_size
