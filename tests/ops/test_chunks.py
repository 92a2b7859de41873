"""The caches of attention within chunks: the unfinished chunk of each row, and nothing else."""

import pytest
import torch

from mega_fairseq.ops.attention import attention
from mega_fairseq.ops.attention.chunks import causal_chunked
from tests.helpers.golden_checks import pieces
from tests.ops.helpers import noise

CHUNK, WIDTH, VALUES = 4, 3, 5
CHUNKS = [1, 2, CHUNK, 100, None]


def qkv(length, batch=3, seed=0):
    sizes = {"q": WIDTH, "k": WIDTH, "v": VALUES}
    return {n: noise(batch, length, s, seed=seed + i, grad=True) for i, (n, s) in enumerate(sizes.items())}


def attend(q, k, v, padding):
    return attention(q, k, v, "laplace", True, key_padding=padding)


def in_pieces(inputs, sizes, chunk_size):
    """The caches after each piece."""
    cache, caches = None, []
    for start, stop in pieces(inputs["q"].size(1), sizes):
        q, k, v = (inputs[name][:, start:stop].clone() for name in "qkv")
        _, cache = causal_chunked(attend, q, k, v, chunk_size, cache)
        caches.append(cache)
    return caches


@pytest.mark.parametrize("sizes", [[1], [3, 5, 1], [4], [13]])
@pytest.mark.parametrize("chunk_size", CHUNKS)
def test_a_cache_contains_only_the_unfinished_chunk(chunk_size, sizes):
    inputs = qkv(13)
    caches = in_pieces(inputs, sizes, chunk_size)
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
    _, cache = causal_chunked(attend, inputs["q"], inputs["k"], inputs["v"], chunk_size, None, lengths)
    for row, length in enumerate(lengths.tolist()):
        start = 0 if chunk_size is None else length - length % chunk_size
        assert (~cache.padding[row]).sum() == length - start
        assert torch.equal(cache.keys[row, : length - start], inputs["k"][row, start:length])
        assert torch.equal(cache.values[row, : length - start], inputs["v"][row, start:length])
        assert not cache.keys[row, length - start :].any()
    assert chunk_size is None or cache.keys.size(1) < chunk_size
