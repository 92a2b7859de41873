"""Caches grow in place but behave as values: older states, copies and selected rows never change."""

import pytest
import torch

from mega_fairseq.ops.attention.chunks import MIN_SPARE, KeyValues

WIDTH, VALUES = 3, 5


def tokens(count, batch=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(batch, count, w, generator=generator) for w in (WIDTH, VALUES))


def grown(counts, chunk_size=None):
    cache, all_keys = KeyValues(*(t[:, :0] for t in tokens(1))), []
    for seed, count in enumerate(counts):
        keys, values = tokens(count, seed=seed)
        cache, all_keys = cache.append(keys, values, chunk_size), [*all_keys, keys]
    return cache, torch.cat(all_keys, 1)


@pytest.mark.parametrize("counts", [[1] * 70, [5, 1, 200, 1, 1], [64, 1], [63, 1, 1], [130]])
@torch.no_grad()
def test_a_cache_that_grows_in_place_contains_all_appended_tokens(counts):
    cache, expected = grown(counts)
    assert torch.equal(cache.keys, expected)


@torch.no_grad()
def test_most_appends_copy_no_old_tokens():
    cache, _ = grown([1])
    storages = set()
    for seed in range(1000):
        cache = cache.append(*tokens(1, seed=seed), None)
        storages.add(cache.keys.data_ptr())
    assert len(storages) <= 13  # each buffer is 1.5 times as large as the previous one


@torch.no_grad()
def test_reordered_rows_keep_their_spare_capacity():
    cache, expected = grown([20])
    order, allocated = torch.tensor([1, 0, 0]), 0
    for seed in range(200):
        cache = cache.select(order)
        chosen, (keys, values) = cache.buffer, tokens(1, batch=3, seed=seed)
        cache, expected = cache.append(keys, values, None), torch.cat([expected[order], keys], 1)
        allocated += cache.buffer is not chosen
        assert torch.equal(cache.keys, expected)
    assert allocated <= 7  # each is 1.5 times as large as the one before


@torch.no_grad()
def test_a_buffer_is_never_larger_than_a_chunk():
    cache, _ = grown([1] * 11, chunk_size=12)
    assert cache.buffer.keys.size(1) == 12 < 11 + MIN_SPARE


@torch.no_grad()
def test_a_piece_that_completes_a_chunk_gets_no_buffer():
    cache, expected = grown([3, 500], chunk_size=12)
    assert cache.buffer is None
    assert torch.equal(cache.keys, expected)


@pytest.mark.parametrize("rows", [[1, 0], [0], [1, 1, 0], [0, 1]])
@torch.no_grad()
def test_selected_rows_of_a_state_do_not_write_into_its_buffer(rows):
    """Selected rows keep the field `buffer`, although it is no longer the storage of their keys and values."""
    cache, _ = grown([3])
    chosen = cache._replace(keys=cache.keys[rows], values=cache.values[rows])
    keys, values = tokens(1, batch=len(rows), seed=7)
    expected = torch.cat([cache.keys[rows], keys], 1)
    assert torch.equal(chosen.append(keys, values, None).keys, expected)
    first = cache._replace(keys=cache.keys[:1], values=cache.values[:1])  # a view that starts at the same address
    assert torch.equal(first.append(keys[:1], values[:1], None).keys, torch.cat([cache.keys[:1], keys[:1]], 1))


@torch.no_grad()
def test_selected_rows_of_a_cache_without_keys_do_not_write_into_its_buffer():
    """Keys without width are at no address, whatever rows they are."""
    (_, values), (_, more) = tokens(3), tokens(1, seed=7)
    cache = KeyValues(values[..., :0], values).append(more[..., :0], more, None)
    chosen = cache._replace(keys=cache.keys[[1, 0]], values=cache.values[[1, 0]])
    expected = torch.cat([cache.values[[1, 0]], more], 1)
    assert torch.equal(chosen.append(more[..., :0], more, None).values, expected)


def test_nothing_is_written_in_place_while_gradients_are_recorded():
    cache, _ = grown([2])
    assert cache.buffer is None
    keys, values = (t.requires_grad_() for t in tokens(1))
    cache.append(keys, values, None).keys.sum().backward()
    assert keys.grad is not None
