"""Negative controls of the token mixers other than Mega: the checks reject mistakes that public code makes."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from mega_fairseq.modules import EXAMPLES, Mixer
from tests.properties import broken_mixers, reference, reference_mixers
from tests.properties.broken_mixers import broken
from tests.properties.contracts import (
    check_batch_independence,
    check_equals_reference,
    check_finite,
    check_nothing_from_the_future,
    check_nothing_is_stale,
    check_ragged_pieces,
    check_split_anywhere,
    check_state_is_a_value,
)
from tests.properties.controls import LEFT, OTHER, RIGHT, ROWS, TAILS, X, rejects
from tests.properties.layers import randomise, stateless, with_state

CHUNK = 4


def made(name: str, **options: Any) -> Mixer:
    """An example of a mixer with other options."""
    return randomise(replace(EXAMPLES[name], **options).build(), 5)


# ------------------------------------------------------------------------------------------- divisors


def test_a_divisor_that_counts_later_tokens_is_rejected():
    healthy = made("gau", chunk_size=None, shared_dim=4, value_dim=8, max_positions=32)
    twin = with_state(broken(healthy, broken_mixers.DividesByTheLength))
    rejects(check_nothing_from_the_future, with_state(healthy), twin, X, OTHER, 4, saying="before 4 without the rest")
    rejects(check_split_anywhere, with_state(healthy), twin, X, [4, 5], saying="outputs over pieces")


def test_a_memory_divided_by_the_size_of_a_chunk_is_rejected_in_the_third_chunk():
    healthy = made("flash", chunk_size=CHUNK)
    twin = with_state(broken(healthy, broken_mixers.DividesByTheChunk))
    slow = reference.per_sequence(reference_mixers.flash, healthy)
    check_equals_reference(twin, slow, X[:, : 2 * CHUNK])
    rejects(check_equals_reference, with_state(healthy), twin, slow, X[:, : 2 * CHUNK + 1], saying="outputs at length")


@torch.no_grad()
def test_outputs_of_flash_do_not_grow_with_the_number_of_chunks():
    healthy = made("flash", position_bias="none", norm_affine=False, chunk_size=CHUNK)
    x = X[:, :CHUNK].repeat(1, 100, 1)

    def largest(mixer):
        return (mixer(x)[0] - x).abs().view(2, 100, -1).amax((0, 2))  # in each chunk

    sizes = largest(healthy)
    torch.testing.assert_close(sizes[1:], sizes[1].expand(99))
    sizes = largest(broken(healthy, broken_mixers.DividesByTheChunk))
    assert sizes[99] > 20 * sizes[1]


def test_pads_in_a_divisor_are_rejected():
    healthy = made("flash", causal=False)
    twin = stateless(broken(healthy, broken_mixers.CountsPads))
    for mask in (LEFT, RIGHT):
        rejects(check_batch_independence, stateless(healthy), twin, ROWS, mask, saying="outputs in a batch, row 1")


def test_one_count_of_tokens_for_rows_of_different_lengths_is_rejected():
    healthy = made("flash", chunk_size=CHUNK)
    twin = with_state(broken(healthy, broken_mixers.CountsTheTokensOfTheFirstRow))
    check_split_anywhere(twin, X, [5, 4])
    masks = [RIGHT, torch.zeros(2, 2, dtype=torch.bool)]
    rows = [torch.cat([row, row[:2]]) for row in ROWS]
    rejects(check_ragged_pieces, with_state(healthy), twin, rows, masks, TAILS, saying="ragged pieces, row 1")


# ------------------------------------------------------------------------------------------- places and states


def test_a_table_over_the_places_of_a_piece_is_rejected_unless_cut_at_the_edge_of_a_chunk():
    healthy = made("attention", chunk_size=CHUNK, gamma=True)
    twin = with_state(broken(healthy, broken_mixers.CountsPlacesInThePiece))
    check_split_anywhere(twin, X, [4, 5])
    rejects(check_split_anywhere, with_state(healthy), twin, X, [5, 4], saying="outputs over pieces")


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_token_shift_that_forgets_the_piece_before_is_rejected(name):
    healthy = made(name, token_shift=True)
    twin = broken_mixers.forgets_the_token_before(healthy)
    rejects(check_split_anywhere, with_state(healthy), twin, X, [4, 5], saying="outputs over pieces")


def test_a_memory_that_is_changed_in_place_is_rejected():
    healthy = made("flash", chunk_size=CHUNK)
    twin = broken_mixers.adds_to_its_memory(healthy)
    rejects(check_state_is_a_value, with_state(healthy), twin, X, OTHER, 5, saying="a state that was passed on")


def test_weights_of_places_kept_across_a_change_of_parameters_are_rejected():
    config = EXAMPLES["gmlp"]
    check_nothing_is_stale(lambda: config.build().double(), with_state, X)
    with pytest.raises(AssertionError, match="output or gradient after"):
        check_nothing_is_stale(lambda: broken_mixers.KeepsItsWeights(config).double(), with_state, X)


# ------------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize("kind", [broken_mixers.TakesNoMaximum, broken_mixers.TakesTheMaximumOfLaterKeys])
def test_sums_of_exponentials_without_the_maximum_of_what_a_row_sees_are_rejected(kind):
    healthy = made("aft", chunk_size=16, beta=False, gamma=False)
    twin = with_state(broken(healthy, kind))
    check_equals_reference(twin, reference.per_sequence(reference_mixers.aft, healthy), X)  # right for small keys
    with torch.no_grad():
        healthy.key.weight.mul_(1000.0)
    rejects(check_finite, with_state(healthy), twin, X, saying="output .* is not finite")


def test_a_key_of_two_sets_that_counts_twice_is_rejected_from_a_stride_on():
    healthy = made("sparse, strided", rotary_dims=0, token_shift=False)
    twin = with_state(broken(healthy, broken_mixers.SeesOneKeyTwice))
    slow = reference.per_sequence(reference_mixers.sparse, healthy)
    check_equals_reference(twin, slow, X[:, :3])
    rejects(check_equals_reference, with_state(healthy), twin, slow, X[:, :4], saying="outputs at length 4")
