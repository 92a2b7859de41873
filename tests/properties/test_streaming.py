"""Any split: training, streaming evaluation, prefix decoding and beam search share one code path."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mega_fairseq.modules import MIXERS, BlockState
from mega_fairseq.modules.mixer_state import batch_size
from tests.properties.contracts import (
    assert_close,
    check_ragged_pieces,
    check_reordering,
    check_split_anywhere,
    check_state_is_a_value,
)
from tests.properties.layers import CAUSAL, DIM, layouts, pieces_of, ragged, random_input, recipes, seeds

STREAMING = [kind for kind in CAUSAL if kind != "feed_forward"]

batches = st.integers(1, 3)
lengths = st.integers(1, 24)


def reordered(state, order, last=None):
    """The state of a mixer in another order, as a block reorders it."""
    return BlockState(state).reorder(order, last, None).mixer


@pytest.mark.parametrize("kind", CAUSAL)
@given(data=st.data(), batch=batches, length=lengths, seed=seeds)
def test_pieces_with_carried_state_give_the_outputs_state_and_gradients_of_the_whole(kind, data, batch, length, seed):
    layer = data.draw(recipes(kind)).layer(batch)
    check_split_anywhere(layer, random_input(seed, batch, length, DIM), data.draw(pieces_of(length)))


@pytest.mark.parametrize("kind", CAUSAL)
@given(data=st.data(), batch=batches, seed=seeds)
def test_rows_may_have_different_numbers_of_tokens_in_each_piece(kind, data, batch, seed):
    masks = data.draw(ragged(batch))
    layer = data.draw(recipes(kind)).layer(batch)
    counts = torch.stack([(~mask).sum(1) for mask in masks]).sum(0).tolist()
    rows = [random_input(seed + i, n, DIM) for i, n in enumerate(counts)]
    check_ragged_pieces(layer, rows, masks, random_input(seed + 9, batch, 3, DIM))


@pytest.mark.parametrize("kind", STREAMING)
@given(data=st.data(), batch=batches, length=st.integers(2, 16), seed=seeds, in_place=st.booleans())
def test_a_state_that_was_passed_on_can_be_used_again(kind, data, batch, length, seed, in_place):
    """Without gradients, caches grow in place."""
    layer = data.draw(recipes(kind)).layer(batch)
    x, other = random_input(seed, batch, length, DIM), random_input(seed + 1, batch, length, DIM)
    with torch.set_grad_enabled(not in_place):
        check_state_is_a_value(layer, x, other, data.draw(st.integers(1, length - 1)))


@pytest.mark.parametrize("kind", STREAMING)
@given(data=st.data(), batch=batches, seed=seeds)
def test_rows_of_a_state_can_be_reordered_repeated_and_dropped_like_beams(kind, data, batch, seed):
    layer = data.draw(recipes(kind)).layer(batch)
    if data.draw(st.booleans()):
        mask = data.draw(layouts(data.draw(st.lists(st.integers(0, 12), min_size=batch, max_size=batch))))
    else:
        mask = torch.zeros(batch, data.draw(st.integers(1, 12)), dtype=torch.bool)
    rows = [random_input(seed + i, int(n), DIM) for i, n in enumerate((~mask).sum(1))]
    order = data.draw(st.lists(st.integers(0, batch - 1), min_size=1, max_size=4))
    tails = random_input(seed + 9, len(order), 3, DIM)
    check_reordering(layer, rows, mask, tails, order)
    if kind in MIXERS:
        check_reordering(layer, rows, mask, tails, order, lambda state, rows: reordered(state, torch.tensor(rows)))


@pytest.mark.parametrize("name", MIXERS)
@given(data=st.data(), length=st.integers(1, 12), rows=st.integers(1, 4), seed=seeds)
@torch.no_grad()
def test_reordering_a_mixer_state_in_place_equals_selecting_its_rows(name, data, length, rows, seed):
    mixer = data.draw(recipes(name)).module()
    last = data.draw(st.integers(0, length))
    order = torch.tensor(data.draw(st.lists(st.integers(0, rows - 1), min_size=rows, max_size=rows)))
    x = random_input(seed, rows, length, DIM)
    x[:, : length - last] = x[:1, : length - last]  # rows differ only in their last tokens
    states = [mixer(x)[1] for _ in range(2)]
    assert batch_size(states[0]) == rows
    tail = random_input(seed + 1, rows, 3, DIM)
    expected, _ = mixer(tail, reordered(states[0], order))
    actual, _ = mixer(tail, reordered(states[1], order, last))
    assert_close(actual, expected, "outputs after a state was reordered in place")


@pytest.mark.parametrize("kind", [*MIXERS, "block", "decoder_block"])
@given(data=st.data(), length=st.integers(2, 12), rows=st.integers(1, 3), seed=seeds)
@torch.no_grad()
def test_the_form_for_single_tokens_equals_the_module(kind, data, length, rows, seed):
    recipe = data.draw(recipes(kind))
    module = recipe.module()
    first, *tokens = random_input(seed, rows, length, DIM).split(1, 1)
    _, state = module(first, recipe.layer_of(module).start())
    step, stepped = module.step() or module, state
    for token in tokens:
        assert module.takes_step(stepped)
        expected, state = module(token, state)
        actual, stepped = step(token, stepped)
        assert_close(actual, expected, "outputs of a single token")
