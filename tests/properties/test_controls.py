"""Negative controls: each check of contracts.py accepts a correct layer and rejects a deliberately broken one."""

from typing import Any

import pytest
import torch

from mega_fairseq.modules import DampedEMA, GatedAttentionConfig, MovingAverageGatedAttention
from mega_fairseq.ops.attention.chunks import KeyValues
from tests.properties import broken, reference
from tests.properties.contracts import (
    Layer,
    check_batch_independence,
    check_equals_reference,
    check_finite,
    check_near,
    check_nothing_from_the_future,
    check_nothing_is_stale,
    check_ragged_pieces,
    check_reordering,
    check_split_anywhere,
    check_state_is_a_value,
)
from tests.properties.controls import LEFT, OTHER, RIGHT, ROWS, TAILS, X, rejects
from tests.properties.layers import DIM, random_input, randomise, stateless, with_state


def ema(**options: Any) -> DampedEMA:
    return randomise(DampedEMA(DIM, 2, **options), 5)


def attention(seed: int = 5, **options: Any) -> MovingAverageGatedAttention:
    config = GatedAttentionConfig(DIM, shared_dim=2, value_dim=8, ndim=2, max_positions=32, **options)
    return randomise(MovingAverageGatedAttention(config), seed)


# ------------------------------------------------------------------------------------------- any split


def test_a_layer_that_forgets_its_state_is_rejected():
    for healthy in (with_state(ema()), with_state(attention(chunk_size=4))):
        twin = broken.forgets_its_state(healthy)
        rejects(check_split_anywhere, healthy, twin, X, [4, 5], saying="outputs over pieces")


def test_attention_that_forgets_its_unfinished_chunk_is_rejected_unless_cut_at_its_edge():
    module = attention(chunk_size=4)

    def step(x, state, mask):
        if state is not None:
            state = state._replace(cache=KeyValues(state.cache.keys[:, :0], state.cache.values[:, :0]))
        return module(x, state, mask)

    twin = Layer(step, list(module.parameters()))
    check_split_anywhere(twin, X, [4, 5])
    rejects(check_split_anywhere, with_state(module), twin, X, [5, 4], saying="outputs over pieces")


def test_a_state_without_gradients_is_rejected():
    healthy = with_state(ema())
    rejects(check_split_anywhere, healthy, broken.detaches_its_state(healthy), X, [4, 5], saying="gradient")


def test_a_wrong_final_state_is_rejected():
    healthy = with_state(ema())

    def step(x, state, mask):
        y, new = healthy.step(x, state, mask)
        return y, new * (1.0 if state is None else 1.0 + 1e-6)

    rejects(check_split_anywhere, healthy, Layer(step, healthy.parameters), X, [8, 1], saying="state after pieces")


def test_a_state_that_decays_at_pads_is_rejected_in_ragged_pieces():
    module = ema()
    masks = [RIGHT, torch.zeros(2, 1, dtype=torch.bool)]
    rows = [torch.cat([row, row[:1]]) for row in ROWS]
    args = (rows, masks, TAILS)
    rejects(
        check_ragged_pieces, with_state(module), broken.ages_at_pads(module), *args, saying="over ragged pieces, row 1"
    )


def test_a_state_written_in_place_is_rejected():
    module = ema()
    twin = broken.writes_into_its_state(module)
    rejects(check_state_is_a_value, with_state(module), twin, X, OTHER, 4, saying="a state that was passed on")


def test_a_state_kept_as_an_attribute_is_rejected():
    module = ema()
    twin = Layer(broken.KeepsItsStateAsAnAttribute(module))
    rejects(check_state_is_a_value, with_state(module), twin, X, OTHER, 4, saying="a state used before")


def test_a_state_that_cannot_be_reordered_is_rejected():
    module = ema()
    twin = broken.hides_its_state(module)
    args = (ROWS, RIGHT, TAILS, [1, 0])
    rejects(check_reordering, with_state(module), twin, *args, saying="row 0 continues sequence 1")


# ------------------------------------------------------------------------------------------- batch independence


def test_a_layer_that_ignores_the_mask_is_rejected():
    healthy = stateless(attention(causal=False))
    twin = broken.ignores_the_mask(healthy)
    rejects(check_batch_independence, healthy, twin, ROWS, RIGHT, saying="outputs in a batch")


def test_nonzero_padded_outputs_are_rejected():
    healthy = with_state(ema())
    twin = broken.leaves_padded_outputs(healthy)
    rejects(check_batch_independence, healthy, twin, ROWS, LEFT, saying="not zero")


def test_gradients_of_padded_inputs_are_rejected():
    healthy = with_state(ema())
    twin = broken.leaks_gradients_into_pads(healthy)
    rejects(check_batch_independence, healthy, twin, ROWS, LEFT, saying="has a gradient")


def test_chunk_borders_that_count_pads_are_rejected_with_left_padding():
    healthy, twin = broken.chunked_means(4), broken.chunked_means(4, counts_pads=True)
    check_batch_independence(twin, ROWS, RIGHT)
    rejects(check_batch_independence, healthy, twin, ROWS, LEFT, saying="outputs in a batch, row 1")


def test_statistics_over_the_batch_are_rejected():
    healthy = with_state(ema())
    twin = broken.normalises_over_time(healthy)
    full = [x.clone() for x in X]
    mask = torch.zeros(2, 9, dtype=torch.bool)
    rejects(check_batch_independence, healthy, twin, full, mask, saying="outputs in a batch")


def test_a_state_that_depends_on_padding_is_rejected():
    module = ema()
    twin = broken.ages_at_pads(module)
    rejects(check_batch_independence, with_state(module), twin, ROWS, RIGHT, TAILS, saying="after a batch, row 1")


# ------------------------------------------------------------------------------------------- causality


def test_a_norm_over_time_is_rejected_as_not_causal():
    healthy = with_state(ema())
    twin = broken.normalises_over_time(healthy)
    rejects(check_nothing_from_the_future, healthy, twin, X, OTHER, 4, saying="when the rest changes")


def test_a_bidirectional_layer_is_rejected_as_not_causal():
    for healthy, twin in (
        (with_state(ema()), stateless(ema(bidirectional=True))),
        (with_state(attention()), stateless(attention(causal=False))),
        (broken.chunked_means(4), broken.chunked_means(4, looks_ahead=True)),
    ):
        rejects(check_nothing_from_the_future, healthy, twin, X, OTHER, 5, saying="when the rest changes")


def test_a_leak_of_only_values_or_only_gradients_is_rejected():
    healthy = with_state(ema())
    for values, gradients, saying in ((True, False, "when the rest changes"), (False, True, "gradient of outputs")):
        twin = broken.shows_the_next_input(healthy, values, gradients)
        rejects(check_nothing_from_the_future, healthy, twin, X, OTHER, 4, saying=saying)


# ------------------------------------------------------------------------------------------- any length


def test_dropping_the_unfinished_chunk_is_rejected_except_at_multiples_of_the_chunk_size():
    module = attention(chunk_size=4)
    slow = reference.per_sequence(reference.gated_attention, module)
    twin = broken.drops_the_unfinished_chunk(with_state(module), 4)
    check_equals_reference(twin, slow, X[:, :8])
    for length in (1, 3, 5, 7, 9):
        rejects(check_equals_reference, with_state(module), twin, slow, X[:, :length], saying=f"at length {length}")


def test_attention_across_a_chunk_edge_is_rejected_one_token_past_it():
    module, wide = attention(chunk_size=4, position_bias="rotary"), attention(chunk_size=None, position_bias="rotary")
    slow = reference.per_sequence(reference.gated_attention, module)
    named = dict(module.named_parameters())

    def step(x, state, mask):  # with the same parameters, so that gradients can be compared
        return torch.func.functional_call(wide, named, (x, state, mask))

    twin = Layer(step, list(module.parameters()))
    check_equals_reference(twin, slow, X[:, :4])
    rejects(check_equals_reference, with_state(module), twin, slow, X[:, :5], saying="outputs at length 5")


def test_a_parameter_without_its_gradient_is_rejected():
    module = ema()
    slow = reference.per_sequence(reference.ema, module)
    detached = {name: p.detach() if name == "omega" else p for name, p in module.named_parameters()}

    def step(x, state, mask):
        return torch.func.functional_call(module, detached, (x, state, mask))

    twin = Layer(step, list(module.parameters()))
    rejects(check_equals_reference, with_state(module), twin, slow, X, saying="gradient")


# ------------------------------------------------------------------------------------------- numerical stability


def extreme(log_of: str, logit: float) -> Layer:
    module = broken.PlainEMA(log_of=log_of)
    with torch.no_grad():
        module.alpha.fill_(logit)
        module.delta.fill_(logit)
    return with_state(module)


@pytest.mark.parametrize(("log_of", "saying"), [("naive", "output"), ("where", "gradient")])
def test_infinite_logs_of_decays_are_rejected_even_if_only_their_gradient_is_not_finite(log_of, saying):
    check_finite(extreme(log_of, 1.0), X)
    rejects(check_finite, extreme("safe", 1e4), extreme(log_of, 1e4), X, saying=f"{saying} .* is not finite")


def test_half_precision_decays_are_rejected():
    torch.manual_seed(0)
    exact, half = broken.PlainEMA(), broken.PlainEMA(log_of="half")
    half.load_state_dict(exact.state_dict())
    with torch.no_grad():
        for module in (exact, half):
            module.alpha.fill_(-3.0)
            module.delta.fill_(-3.0)
    x = random_input(1, 1, 300, DIM)
    rejects(check_near, with_state(exact), with_state(half), with_state(exact), x, 1e-2, saying="relative RMS error")


# ------------------------------------------------------------------------------------------- no stale caches


@pytest.mark.parametrize(
    ("keep", "saying"), [("always", "after"), ("in evaluation", "output or gradient after an update in place")]
)
def test_a_kernel_cached_across_a_change_of_parameters_is_rejected(keep, saying):
    check_nothing_is_stale(broken.PlainEMA, with_state, X)
    with pytest.raises(AssertionError, match=saying):
        check_nothing_is_stale(lambda: broken.PlainEMA(keep=keep), with_state, X)


def test_a_backward_pass_that_overwrites_saved_tensors_is_rejected():
    with pytest.raises(AssertionError, match="second backward pass"):
        check_nothing_is_stale(broken.SpoilsItsGraph, with_state, X)
