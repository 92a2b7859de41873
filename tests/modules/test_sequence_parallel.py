"""Slices of sequences in several processes: outputs and gradients are those of one process with whole sequences."""

import math
from copy import deepcopy
from dataclasses import replace
from typing import Dict, List, Optional

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mega_fairseq.modules import EXAMPLES, MIXERS, Block, BlockState, FeedForwardConfig, MixerConfig
from mega_fairseq.modules.sequence_parallel import SequenceParallelState, share_sequences
from mega_fairseq.ops.sequence_parallel import SequenceGroup, Slices
from tests.helpers.golden_models import PAD
from tests.helpers.processes import in_processes
from tests.helpers.small_models import ADAPTIVE, language_model, padded, texts
from tests.helpers.small_models import CHUNK as CHUNK_OF_MODEL
from tests.ops.helpers import assert_same, kept_for_backward, noise, relative_error
from tests.properties.layers import randomise

pytestmark = pytest.mark.slow

DIM, CHUNK, LAYERS = 4, 6, 2


def shareable(config: MixerConfig) -> bool:
    try:
        share_sequences(Block(config))
    except ValueError:
        return False
    return True


FORMS = {name: example for name, example in EXAMPLES.items() if shareable(example)}
# Tokens of two pieces, each divided into slices. All slices of the first are equal, since a state follows it.
LENGTHS = (24, 31)


def stack(form: str) -> List[Block]:
    config = FORMS[form]
    made = [Block(config, FeedForwardConfig(DIM)) for _ in range(LAYERS)]
    for block in made:
        share_sequences(block)
    return [randomise(block, seed) for seed, block in enumerate(made)]


def run(blocks: List[Block], x: Tensor, states: List[BlockState], slices: Optional[Slices] = None) -> Tensor:
    """The stack on x after `states`, which become the states after it."""
    for i, block in enumerate(blocks):
        x, states[i] = block(x, states[i] if slices is None else SequenceParallelState(slices, states[i]))
    return x


def loss_of(y: Tensor) -> Tensor:
    return (y * noise(*y.shape, seed=9)).sum()


def whole(blocks: List[Block]) -> Dict[str, Tensor]:
    """Outputs and gradients of one process."""
    x, states = noise(2, sum(LENGTHS), DIM, grad=True), [BlockState(None)] * LAYERS
    y = torch.cat([run(blocks, piece, states) for piece in x.split(LENGTHS, 1)], 1)
    return with_gradients(blocks, y, x)


def with_gradients(blocks: List[Block], y: Tensor, x: Tensor) -> Dict[str, Tensor]:
    named = {f"{i}.{name}": p for i, block in enumerate(blocks) for name, p in block.named_parameters()}
    gradients = torch.autograd.grad(loss_of(y), [x, *named.values()], allow_unused=True, materialize_grads=True)
    return {"y": y.detach(), **dict(zip(["x", *named], gradients))}


def in_slices(blocks: List[Block], group: SequenceGroup) -> Dict[str, Tensor]:
    """The same from this process's slice of each piece, where gradients are sums over all processes."""
    x, states, pieces = noise(2, sum(LENGTHS), DIM, grad=True), [BlockState(None)] * LAYERS, []
    for piece in x.split(LENGTHS, 1):
        slices = group.divide(piece.size(1), CHUNK)
        start, stop = slices.bounds
        own = piece[:, start:stop] if start < stop else piece[:, :1]  # as in piece_in_slices
        pieces.append(slices.join(run(blocks, own, states, slices)[:, : stop - start]))
    found = with_gradients(blocks, torch.cat(pieces, 1), x)
    for name, gradient in found.items():
        if name != "y":
            found[name] = gradient.contiguous()  # or processes would add up numbers of other places
            dist.all_reduce(found[name])
    return found


# ------------------------------------------------------------------------------------------------ exact


def compare(form: str, group: SequenceGroup) -> None:
    blocks = stack(form)
    try:
        assert_same(in_slices(blocks, group), whole(blocks), rtol=1e-7, atol=1e-8)
    except AssertionError as error:
        raise AssertionError(f"{form}: {error}") from None


def compare_all_forms() -> None:
    for form in FORMS:
        compare(form, SequenceGroup())


def test_slices_have_the_outputs_and_gradients_of_whole_sequences():
    in_processes(4, compare_all_forms)


def compare_in_bfloat16() -> None:
    """Errors are those of rounding to 8 bits, as long as states are exchanged in float32."""
    group, x = SequenceGroup(), noise(2, 24, DIM, dtype=torch.bfloat16)
    slices = group.divide(24, CHUNK)
    for form in FORMS:
        blocks = [block.bfloat16() for block in stack(form)]
        expected = run(blocks, x, [BlockState(None)] * LAYERS)
        found = slices.join(run(blocks, x[:, slice(*slices.bounds)], [BlockState(None)] * LAYERS, slices))
        assert found.dtype == torch.bfloat16
        assert relative_error(found, expected.double()) < 0.02, form


def test_slices_in_half_precision_are_as_good_as_whole_sequences():
    in_processes(2, compare_in_bfloat16)


class NothingBefore(SequenceGroup):
    """Broken: no state crosses a border."""

    def all_gather(self, own: Tensor) -> Tensor:
        every = super().all_gather(own)
        return every if own.dim() == 3 and own.size(2) == DIM and own.size(1) > 1 else torch.zeros_like(every)


class NoGradientsBack(SequenceGroup):
    """Broken: states cross, their gradients do not."""

    def all_to_all(self, parts: Tensor) -> Tensor:
        return torch.zeros_like(super().all_to_all(parts))


def reject(form: str) -> None:
    for broken in (NothingBefore(), NoGradientsBack()):
        try:
            compare(form, broken)
        except AssertionError:
            continue
        raise RuntimeError(f"{form} does not notice {type(broken).__doc__}")


def reject_in_all_forms_with_a_state() -> None:
    for form in filter(numbers_exchanged, FORMS):  # the others only join their outputs, which `NothingBefore` allows
        reject(form)


def test_the_comparison_rejects_states_or_gradients_that_do_not_cross():
    in_processes(2, reject_in_all_forms_with_a_state)


# ------------------------------------------------------------------------------------------------ language models


def compare_models() -> None:
    """Log-probabilities, in one pass and in pieces, and the gradients of the parameters."""
    rows, targets = texts(67, 40, 5)
    for options in ({}, ADAPTIVE, {"checkpoint_activations": True}, {"token_mixer": "megalodon"}):
        for left in (False, True):
            source, target = (padded(part, left) for part in (rows, targets))
            for training, piece in ((True, 0), (False, 10**6), (False, 3 * CHUNK_OF_MODEL * len(rows))):
                expected, found = (
                    log_probs(options, source, target, training, piece, group) for group in (False, True)
                )
                assert_same(found, expected, rtol=1e-5, atol=1e-5)


def log_probs(options, source: Tensor, target: Tensor, training: bool, piece: int, shared: bool) -> Dict[str, Tensor]:
    model = language_model(**options).train(training)
    model.decoder.cfg.piece_tokens = piece  # in evaluation
    if shared:
        model.decoder.share_sequences(SequenceGroup())
        model = deepcopy(model)  # as fairseq does for --store-ema
    found = model(source, target=target)[0].squeeze(-1).masked_fill(target == PAD, 0.0)
    result = {"log-probabilities": found.detach()}
    if training:
        loss_of(found.double()).backward()
        for name, parameter in model.named_parameters():
            result[name] = parameter.grad
            if shared:
                dist.all_reduce(result[name])
    return result


def test_a_language_model_has_the_log_probabilities_and_gradients_of_one_process():
    in_processes(2, compare_models)


# ------------------------------------------------------------------------------------------------ traffic


class Counting(SequenceGroup):
    """Counts the numbers that this process sends to each other process, forward and backward."""

    def __init__(self):
        super().__init__()
        self.sent = [0, 0]

    def all_gather(self, state: Tensor) -> Tensor:
        self.sent[0] += state.numel()
        return super().all_gather(state)

    def all_to_all(self, parts: Tensor) -> Tensor:
        self.sent[1] += parts[0].numel()
        return super().all_to_all(parts)


def sent(form: str, batch: int = 2) -> List[int]:
    """The numbers sent for one piece, without the outputs."""
    group, x = Counting(), noise(batch, 36, DIM)
    slices = group.divide(36, CHUNK)
    own = x[:, slice(*slices.bounds)].requires_grad_()
    loss_of(run(stack(form), own, [BlockState(None)] * LAYERS, slices)).backward()
    return group.sent


def sent_in_all_forms() -> Dict[str, List[int]]:
    return {form: sent(form) for form in FORMS}


def numbers_exchanged(form: str) -> int:
    """Numbers of a row's state that cross a border in each layer: nothing for attention in chunks."""
    shapes = Block(FORMS[form]).mixer.state_shapes()
    return sum(math.prod(s) for path, s in shapes.items() if s and not path.endswith((".keys", ".values")))


def test_what_crosses_a_border_is_the_state_alone():
    expected = {form: [2 * LAYERS * numbers_exchanged(form)] * 2 for form in FORMS}
    assert in_processes(3, sent_in_all_forms) == [expected] * 3


def kept_for_a_slice() -> List[int]:
    """Numbers kept for backward by an EMA of a slice, and by one of a sequence that follows a state."""
    x, slices = noise(2, 640, DIM, dtype=torch.float32, grad=True), SequenceGroup().divide(1280, 64)
    shared = Block(MIXERS["mega"](DIM, ndim=3, chunk_size=64))
    share_sequences(shared)
    ema, state = shared.mixer.ema, noise(2, DIM, 3, dtype=torch.float32, grad=True)
    kept = []
    for ema.exchange.slices in (slices, None):
        kept.append(sum(kept_for_backward(lambda: ema(x, state))))
    return kept


def test_reducing_a_slice_to_its_state_keeps_no_copy_of_the_slice():
    for of_slice, of_sequence in in_processes(2, kept_for_a_slice):
        assert of_slice - of_sequence < 2 * 640 * DIM // 4


# ------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize("form", ["mega", "gau", "attention", "sparse"])
def test_mixers_without_chunks_are_refused(form):
    with pytest.raises(ValueError, match="chunk_size is None"):
        share_sequences(Block(replace(FORMS[form], chunk_size=None)))


REFUSED = [("flash", "memory"), ("aft, local", "older"), ("aft, simple", "older"), ("mega, truncated", "ema")]


@pytest.mark.parametrize(("form", "state"), [*REFUSED, ("gmlp, paper", "token shift")])
def test_a_recurrence_without_a_twin_is_refused(form, state):
    with pytest.raises(ValueError, match=state):
        share_sequences(Block(EXAMPLES[form]))


def test_token_shift_in_the_feed_forward_layer_alone_is_refused():
    with pytest.raises(ValueError, match="token shift"):
        share_sequences(Block(EXAMPLES["mega"], FeedForwardConfig(DIM, token_shift=True)))
