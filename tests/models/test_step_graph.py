"""Steps in the fixed storage of a CUDA graph equal eager ones. Here, a graph is replayed by running its step again."""

import copy

import pytest
import torch
from fairseq.sequence_generator import SequenceGenerator
from hypothesis import given
from torch.nn.modules.module import register_module_forward_hook

from mega_fairseq.acceleration import step_graph
from mega_fairseq.acceleration.step_graph import GraphState, rounded
from tests.helpers.golden_models import task
from tests.helpers.pretended_device import PretendedDevice, moved
from tests.helpers.profiles import examples
from tests.helpers.small_models import (
    BEAMS,
    IN_LINES,
    SENTENCES,
    TYPES,
    Search,
    language_model,
    orders_of_beams,
    sources,
    translation_model,
)

MODELS = {
    "full": (translation_model, {}),
    "chunks": (translation_model, {"decoder_chunk_size": 3, "rel_pos_bias": "rotary", "normalize_before": True}),
    "lines": (translation_model, {**IN_LINES, "decoder_chunk_size": 3, "rel_pos_bias": "rotary"}),
    "laplace": (translation_model, {"attention_activation_fn": "laplace", "truncation_length": 4}),
    "rope": (translation_model, {"rel_pos_bias": "rope", "decoder_chunk_size": 5}),
    "language model": (language_model, {"decoder_chunk_size": 4}),
    "gau": (language_model, {"token_mixer": "gau", "decoder_token_shift": True}),
    "megalodon": (language_model, {"token_mixer": "megalodon", "decoder_chunk_size": 4, "decoder_two_hop": True}),
}


@pytest.fixture(autouse=True, scope="module")
def repeated_steps():
    """Stands in for a GPU: the same storage and the same steps, without a graph."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_graph, "capture_on", lambda device: list)
        patch.setattr(step_graph, "FIRST_CAPACITY", 4)
        yield


def prepared(name):
    build, options = MODELS[name]
    model = build(**options).eval()
    model.make_generation_fast_()
    return model


class Decoding(Search):
    """Decodes with graphs and without."""

    def __init__(self, model, seed=0):
        super().__init__(model, seed, states=2)
        self.graphs = model.decoder.steps.graphs

    @torch.no_grad()
    def assert_equal_scores(self):
        found, steps = [], self.model.decoder.steps
        for number, steps.graphs in enumerate((self.graphs, None)):
            found.append(self.decode(number))
        torch.testing.assert_close(*found, atol=2e-6, rtol=1e-5)


def check(name, orders):
    decoding = Decoding(prepared(name))
    decoding.assert_equal_scores()
    for order in orders:
        decoding.follow(order)
        decoding.assert_equal_scores()
    assert isinstance(decoding.kept(), GraphState)


@pytest.mark.parametrize("name", MODELS)
@given(orders=orders_of_beams())
@examples(15)
def test_scores_equal_those_of_eager_steps(name, orders):
    check(name, orders)


def test_an_order_that_is_not_followed_is_detected(monkeypatch):
    monkeypatch.setattr(GraphState, "reorder", lambda self, order, alike: self)
    with pytest.raises((AssertionError, RuntimeError)):
        check("full", [[1, 0, 2, 3, 4, 5, 6, 7, 8]] * 4)


def test_storage_of_an_earlier_search_has_no_effect():
    decoding = Decoding(prepared("full"))
    for _ in range(2):
        decoding.states = ({}, {})
        decoding.tokens = decoding.tokens[:, :1]
        decoding.assert_equal_scores()
        for order in [list(range(9))] * 5:
            decoding.follow(order)
            decoding.assert_equal_scores()
        decoding.out = decoding.model.encoder.reorder_encoder_out(
            decoding.model.encoder(sources()[:, :5]), torch.arange(SENTENCES).repeat_interleave(BEAMS)
        )
    assert len(decoding.graphs.graphs) == 2  # of 4 and of 8 tokens


def test_copies_of_a_state_and_searches_at_once_have_storage_of_their_own():
    first, second = (Decoding(prepared("language model"), seed) for seed in (0, 1))
    second.model, second.graphs = first.model, first.graphs
    order = list(range(9))
    for decoding in (first, second) * 5:
        decoding.assert_equal_scores()
        decoding.follow(order)
        first.states[0].update(copy.deepcopy(first.states[0]))


def test_a_forced_prefix_leaves_pads_in_rows_without_probability():
    model, dictionary = prepared("language model"), task(TYPES).target_dictionary
    sample, found, graphs = {"net_input": {"src_tokens": sources(pad_left=False)}}, [], model.decoder.steps.graphs
    for model.decoder.steps.graphs in (graphs, None):
        generator = SequenceGenerator([model], dictionary, beam_size=3, max_len_b=12)
        found.append(generator.generate([model], sample, prefix_tokens=sources()[:, 3:])[0])
    for ours, eager in zip(*found):
        assert torch.equal(ours["tokens"], eager["tokens"])


@pytest.mark.parametrize("of_all", [False, True])
def test_hooks_fire_at_every_step(of_all):
    decoding, calls = Decoding(prepared("language model")), []
    hooked = decoding.model.decoder.layers[0].mixer.hidden
    register = register_module_forward_hook if of_all else hooked.register_forward_hook
    hook = register(lambda module, *call: calls.append(call) if module is hooked else None)
    try:
        for _ in range(4):
            decoding.assert_equal_scores()
            decoding.follow(list(range(9)))
    finally:
        hook.remove()
    assert len(calls) == 8
    assert not decoding.graphs.graphs


@torch.no_grad()
@pytest.mark.parametrize("name", ["chunks", "language model"])
def test_steps_and_reorderings_on_a_gpu_wait_for_nothing(name):
    with PretendedDevice() as device:
        model, out, state = moved(prepared(name)), None, {}
        tokens, order = moved(torch.full((9, 20), 7)), moved(torch.tensor([1, 0, 2, 4, 3, 3, 7, 8, 6]))
        if name == "chunks":
            sentences = moved(torch.arange(SENTENCES).repeat_interleave(BEAMS))
            out = model.encoder.reorder_encoder_out(model.encoder(moved(sources())), sentences)
        for length in range(1, 20):
            model.decoder(tokens[:, :length], out, state)
            if length == 2:  # eager, then in a graph
                device.waits.clear()
            model.decoder.reorder_incremental_state(state, order)
        assert model.decoder.steps.graphs.graphs
        assert not device.waits
        state.clear()  # ends the search, which checks its numbers, while there is a device


def test_a_step_that_cannot_be_captured_runs_without_a_graph(monkeypatch, caplog):
    def capture(steps):
        if steps[0].__self__.size.tokens > 4:
            raise RuntimeError("no such stream")
        return steps

    monkeypatch.setattr(step_graph, "capture_on", lambda device: capture)
    decoding = Decoding(prepared("full"))
    for _ in range(9):
        decoding.assert_equal_scores()
        decoding.follow([1, 0, 2, 4, 3, 3, 7, 8, 6])
    assert len(decoding.graphs.graphs) == 1
    assert [record.levelname for record in caplog.records if "no such stream" in record.message] == ["WARNING"]


def test_a_step_whose_capture_runs_out_of_memory_is_an_error(monkeypatch):
    def capture(steps):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(step_graph, "capture_on", lambda device: capture)
    decoding = Decoding(prepared("full"))
    decoding.assert_equal_scores()
    decoding.follow([1, 0, 2, 4, 3, 3, 7, 8, 6])
    with pytest.raises(torch.cuda.OutOfMemoryError):
        decoding.assert_equal_scores()


def test_sizes_are_few_and_at_most_half_empty():
    sizes = [rounded(count) for count in range(1, 1000)]
    assert all(count <= size < 2 * count or count == 1 for count, size in enumerate(sizes, 1))
    assert len(set(sizes)) < 20
