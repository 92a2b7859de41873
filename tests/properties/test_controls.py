"""Negative controls: each check of contracts.py accepts a correct layer and rejects a deliberately broken one."""

from dataclasses import replace
from functools import partial
from typing import Any, Callable

import pytest
import torch

from mega_fairseq.modules import EXAMPLES, DampedEMA, GatedAttentionConfig, Mixer
from mega_fairseq.modules.timestep_norm import TimestepNorm
from tests.properties import broken, reference, reference_mixers
from tests.properties.broken import as_class
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
from tests.properties.layers import DIM, random_input, randomise, stateless, with_state

CHUNK = 4
X, OTHER = random_input(1, 2, 9, DIM), random_input(2, 2, 9, DIM)
TAILS = random_input(3, 2, 3, DIM)
ROWS = [random_input(4, 7, DIM), random_input(5, 4, DIM)]
LONGER = [torch.cat([row, row[:2]]) for row in ROWS]
LEFT = torch.zeros(2, 7, dtype=torch.bool)
LEFT[1, :3] = True
RIGHT = LEFT.flip(1)


def no_pads(length: int) -> torch.Tensor:
    return torch.zeros(2, length, dtype=torch.bool)


def ema() -> Layer:
    return with_state(randomise(DampedEMA(DIM, 2), 5))


def timestep_norm() -> Layer:
    return with_state(randomise(TimestepNorm(DIM, 1), 5))


def both_ways() -> Layer:
    return stateless(randomise(DampedEMA(DIM, 2, bidirectional=True), 5))


def built(name: str, **options: Any) -> Mixer:
    """An example of a mixer with other options."""
    return randomise(replace(EXAMPLES[name], **options).build(), 5)


def mega(**options: Any) -> Mixer:
    config = GatedAttentionConfig(DIM, shared_dim=2, value_dim=8, ndim=2, max_positions=32, **options)
    return randomise(config.build(), 5)


def mixer(make: Callable[..., Mixer], *args: Any, **options: Any) -> Layer:
    module = make(*args, **options)
    return with_state(module) if module.config.causal else stateless(module)


chunks_of_mega = partial(mixer, mega, chunk_size=CHUNK)
gau = partial(mixer, built, "gau", chunk_size=None, shared_dim=4, value_dim=8, max_positions=32)
flash = partial(mixer, built, "flash", chunk_size=CHUNK)
megalodon = partial(mixer, built, "megalodon", chunk_size=CHUNK)
tabled = partial(mixer, built, "attention", chunk_size=CHUNK, gamma=True)
means = partial(broken.chunked_means, CHUNK)


def rejects(check: Callable[..., None], healthy: Layer, twin: Layer, *args: Any, saying: str) -> None:
    check(healthy, *args)
    with pytest.raises(AssertionError, match=saying):
        check(twin, *args)


def instead(make: Callable[[], Layer]) -> broken.Twin:
    """The twin that is another layer."""
    return lambda healthy: make()


# (a correct layer, its twin, the check that rejects the twin, its arguments, what it says)
CONTROLS = {
    check_split_anywhere: [
        (ema, broken.forgets_its_state, (X, [4, 5]), "outputs over pieces"),
        (chunks_of_mega, broken.forgets_its_state, (X, [4, 5]), "outputs over pieces"),
        (chunks_of_mega, broken.forgets_its_unfinished_chunk, (X, [5, 4]), "outputs over pieces"),
        (megalodon, broken.forgets_its_unfinished_chunk, (X, [5, 4]), "outputs over pieces"),
        (ema, broken.detaches_its_state, (X, [4, 5]), "gradient"),
        (timestep_norm, broken.detaches_its_state, (X, [4, 5]), "gradient"),
        (ema, broken.returns_a_wrong_state, (X, [8, 1]), "state after pieces"),
        (gau, as_class(broken.DividesByTheLength), (X, [4, 5]), "outputs over pieces"),
        (tabled, as_class(broken.CountsPlacesInThePiece), (X, [5, 4]), "outputs over pieces"),
        *(
            (partial(mixer, built, name, token_shift=True), broken.forgets_the_token_before, (X, [4, 5]), "over pieces")
            for name in EXAMPLES
        ),
    ],
    check_ragged_pieces: [
        (ema, broken.ages_at_pads, (LONGER, [RIGHT, no_pads(2)], TAILS), "over ragged pieces, row 1"),
        (
            flash,
            as_class(broken.CountsTheTokensOfTheFirstRow),
            (LONGER, [RIGHT, no_pads(2)], TAILS),
            "ragged pieces, row 1",
        ),
    ],
    check_state_is_a_value: [
        (ema, broken.writes_into_its_state, (X, OTHER, 4), "a state that was passed on"),
        (flash, broken.writes_into_its_state, (X, OTHER, 5), "a state that was passed on"),
        (ema, broken.keeps_its_state, (X, OTHER, 4), "a state used before"),
    ],
    check_reordering: [(ema, broken.hides_its_state, (ROWS, RIGHT, TAILS, [1, 0]), "row 0 continues sequence 1")],
    check_batch_independence: [
        (partial(mixer, mega, causal=False), broken.ignores_the_mask, (ROWS, RIGHT), "outputs in a batch"),
        (ema, broken.leaves_padded_outputs, (ROWS, LEFT), "not zero"),
        (ema, broken.leaks_gradients_into_pads, (ROWS, LEFT), "has a gradient"),
        (means, instead(partial(means, counts_pads=True)), (ROWS, LEFT), "outputs in a batch, row 1"),
        (ema, broken.normalises_over_time, (list(X), no_pads(9)), "outputs in a batch"),
        (ema, broken.ages_at_pads, (ROWS, RIGHT, TAILS), "after a batch, row 1"),
        (timestep_norm, broken.ages_at_pads, (ROWS, LEFT), "outputs in a batch, row 1"),
    ],
    check_nothing_from_the_future: [
        (ema, broken.normalises_over_time, (X, OTHER, 4), "when the rest changes"),
        (ema, instead(both_ways), (X, OTHER, 5), "when the rest changes"),
        (partial(mixer, mega), instead(partial(mixer, mega, causal=False)), (X, OTHER, 5), "when the rest changes"),
        (means, instead(partial(means, looks_ahead=True)), (X, OTHER, 5), "when the rest changes"),
        (ema, broken.shows_values_of_the_next_input, (X, OTHER, 4), "when the rest changes"),
        (ema, broken.shows_gradients_of_the_next_input, (X, OTHER, 4), "gradient of outputs"),
        (gau, as_class(broken.DividesByTheLength), (X, OTHER, 4), "before 4 without the rest"),
    ],
}


@pytest.mark.parametrize("check", CONTROLS)
def test_a_check_rejects_each_mistake(check):
    for make, twin, args, saying in CONTROLS[check]:
        healthy = make()
        rejects(check, healthy, twin(healthy), *args, saying=saying)


def test_mistakes_at_the_edges_of_chunks_are_not_seen_elsewhere():
    """So the checks above depend on where a sequence is cut, and on which side it is padded."""
    check_split_anywhere(broken.forgets_its_unfinished_chunk(chunks_of_mega()), X, [4, 5])
    check_split_anywhere(as_class(broken.CountsPlacesInThePiece)(tabled()), X, [4, 5])
    check_split_anywhere(as_class(broken.CountsTheTokensOfTheFirstRow)(flash()), X, [5, 4])
    check_batch_independence(means(counts_pads=True), ROWS, RIGHT)


def test_pads_in_a_divisor_are_rejected():
    healthy = built("flash", causal=False)
    twin = stateless(broken.broken(healthy, broken.CountsPads))
    for mask in (LEFT, RIGHT):
        rejects(check_batch_independence, stateless(healthy), twin, ROWS, mask, saying="outputs in a batch, row 1")


# ------------------------------------------------------------------------------------------- the equations


def without_gradient_of(name: str) -> broken.Twin:
    def twin(healthy: Layer) -> Layer:
        named = {n: p.detach() if n == name else p for n, p in healthy.step.named_parameters()}
        return Layer(lambda *args: torch.func.functional_call(healthy.step, named, args), healthy.parameters)

    return twin


def across_chunks(healthy: Layer) -> Layer:
    """With the same parameters, so that gradients can be compared."""
    wide, named = mega(position_bias="rotary"), dict(healthy.step.named_parameters())
    return Layer(lambda *args: torch.func.functional_call(wide, named, args), healthy.parameters)


rotary = partial(chunks_of_mega, position_bias="rotary")
one_set = partial(mixer, built, "sparse, strided", rotary_dims=0, token_shift=False)


@pytest.mark.parametrize(
    ("make", "equations", "twin", "accepted", "refused"),
    [
        (ema, reference.ema, without_gradient_of("omega"), [], [9]),
        (chunks_of_mega, reference.gated_attention, broken.drops_the_unfinished_chunk, [4, 8], [1, 3, 5, 7, 9]),
        (rotary, reference.gated_attention, across_chunks, [4], [5]),
        (flash, reference_mixers.flash, as_class(broken.DividesByTheChunk), [2 * CHUNK], [2 * CHUNK + 1]),
        (one_set, reference_mixers.sparse, as_class(broken.SeesOneKeyTwice), [3], [4]),
    ],
    ids=["no gradient", "unfinished chunk", "across chunks", "growing memory", "key seen twice"],
)
def test_wrong_values_or_gradients_are_rejected_at_the_first_length(make, equations, twin, accepted, refused):
    healthy = make()
    slow, wrong = reference.per_sequence(equations, healthy.step), twin(healthy)
    for length in accepted:
        check_equals_reference(wrong, slow, X[:, :length])
    for length in refused:
        rejects(check_equals_reference, healthy, wrong, slow, X[:, :length], saying=f"at length {length}")


@torch.no_grad()
def test_outputs_of_flash_do_not_grow_with_the_number_of_chunks():
    healthy = built("flash", position_bias="none", norm_affine=False, chunk_size=CHUNK)
    x = X[:, :CHUNK].repeat(1, 100, 1)

    def largest(layer):
        return (layer(x)[0] - x).abs().view(2, 100, -1).amax((0, 2))  # in each chunk

    sizes = largest(healthy)
    torch.testing.assert_close(sizes[1:], sizes[1].expand(99))
    sizes = largest(broken.broken(healthy, broken.DividesByTheChunk))
    assert sizes[99] > 20 * sizes[1]


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
    exact, half = extreme("safe", -3.0), extreme("half", -3.0)
    half.step.load_state_dict(exact.step.state_dict())
    x = random_input(1, 1, 300, DIM)
    rejects(check_near, exact, half, exact, x, 1e-2, saying="relative RMS error")


@pytest.mark.parametrize("kind", [broken.TakesNoMaximum, broken.TakesTheMaximumOfLaterKeys])
def test_sums_of_exponentials_without_the_maximum_of_what_a_row_sees_are_rejected(kind):
    healthy = built("aft", chunk_size=16, beta=False, gamma=False)
    twin = as_class(kind)(with_state(healthy))
    check_equals_reference(twin, reference.per_sequence(reference_mixers.aft, healthy), X)  # right for small keys
    with torch.no_grad():
        healthy.key.weight.mul_(1000.0)
    rejects(check_finite, with_state(healthy), twin, X, saying="output .* is not finite")


# ------------------------------------------------------------------------------------------- no stale caches


@pytest.mark.parametrize(
    ("healthy", "twin", "saying"),
    [
        (broken.PlainEMA, partial(broken.PlainEMA, keep="always"), "after"),
        (broken.PlainEMA, partial(broken.PlainEMA, keep="in evaluation"), "gradient after an update in place"),
        (EXAMPLES["gmlp"].build, partial(broken.KeepsItsWeights, EXAMPLES["gmlp"]), "output or gradient after"),
        (broken.PlainEMA, broken.SpoilsItsGraph, "second backward pass"),
    ],
)
def test_what_is_kept_across_a_change_of_parameters_is_rejected(healthy, twin, saying):
    check_nothing_is_stale(lambda: healthy().double(), with_state, X)
    with pytest.raises(AssertionError, match=saying):
        check_nothing_is_stale(lambda: twin().double(), with_state, X)
