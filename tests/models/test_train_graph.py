"""Training steps replayed as CUDA graphs equal eager ones. Here, a graph is a record of operations on the CPU."""

import copy
import gc
import logging
import pickle
import weakref
from functools import partialmethod

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from mega_fairseq.acceleration import train_graph
from mega_fairseq.acceleration.train_graph import bucket
from mega_fairseq.models.stack import Stack
from tests.helpers.profiles import examples
from tests.helpers.recorder import Operations, recorded
from tests.helpers.small_models import IN_LINES, TYPES, classifier, encoder, language_model, translation_model

DROPOUT = {"dropout": 0.2, "attention_dropout": 0.1, "hidden_dropout": 0.1, "activation_dropout": 0.1}
SIDES = {language_model: "decoder", classifier: "encoder", encoder: "encoder"}
MODELS = {
    "translation": (translation_model, {"dropout": 0.0, "max_source_positions": 13, "max_target_positions": 13}),
    "rotary chunks": (translation_model, {"dropout": 0.0, "rel_pos_bias": "rotary", "decoder_chunk_size": 3}),
    "lines": (translation_model, {"dropout": 0.0, "decoder_chunk_size": 3, **IN_LINES}),
    "language model": (language_model, {}),
    "gau": (language_model, {"token_mixer": "gau"}),
    "flash": (language_model, {"token_mixer": "flash"}),
    "megalodon": (language_model, {"token_mixer": "megalodon", "decoder_two_hop": True}),
    "classifier": (classifier, {}),
    "masked language model": (encoder, {}),
}


@pytest.fixture(autouse=True)
def records(monkeypatch):
    monkeypatch.setattr(train_graph, "capture_on", lambda device: recorded)


class Training:
    """A model in training, with graphs or without. A batch is its rows and length."""

    def __init__(self, name, graphs, **options):
        build, own = MODELS[name]
        layers = {f"{side}_layers": 1 for side in ("encoder", "decoder") if side == SIDES.get(build, side)}
        self.masked = build is encoder
        self.model = build(**{**layers, **own, **options, "cuda_graphs": "auto" if graphs else "off"}).train()
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)

    def loss(self, rows, length, pads=0):
        random = torch.Generator().manual_seed(rows * 100 + length)
        source, target, before = (torch.randint(4, TYPES, (rows, length), generator=random) for _ in range(3))
        source[0, length - pads :] = 1
        if self.masked:
            masked = (target % 3 == 0) & (source != 1)
            scores = self.model(source, masked_tokens=masked)[0]
            return F.cross_entropy(scores, before[masked], reduction="sum") / source.numel()
        if hasattr(self.model, "classification_heads"):
            scores, _ = self.model(source, classification_head_name="head")
            return F.cross_entropy(scores, target[:, 0] % 3)
        if not hasattr(self.model, "encoder"):
            return -self.model(source, target=target)[0].mean()
        before[0, length - pads // 2 :] = 1
        return F.cross_entropy(self.model(source, None, before)[0].flatten(0, 1), target.flatten())

    def update(self, *batches, together=False):
        """One step for several batches, as with --update-freq, or as in criteria that compare forward passes."""
        losses = []
        for batch in batches:
            losses.append(self.loss(*batch))
            if not together:
                losses[-1].backward()
        if together:
            sum(losses).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return [loss.detach() for loss in losses]

    forward_twice = partialmethod(update, together=True)

    @torch.no_grad()
    def validate(self, batch):
        self.model.eval()
        loss = self.loss(*batch)
        self.model.train()
        return [loss]

    def forget(self, batch):
        """A forward pass without a backward pass."""
        return [self.loss(*batch).detach()]

    def graphs(self):
        stacks = [getattr(self.model, side) for side in ("encoder", "decoder") if hasattr(self.model, side)]
        return [g for each in stacks for g in each.passes.graphs.values() if g is not None]


def assert_equal_training(name, events, tolerance=0.0, **options):
    """Runs events (a method and batches) with graphs and without."""
    both = Training(name, True, **options), Training(name, False, **options)
    losses = []
    for training in both:
        torch.manual_seed(3)
        losses.append([loss for method, *batches in events for loss in getattr(training, method)(*batches)])
    torch.testing.assert_close(*losses, atol=tolerance, rtol=tolerance)
    weights = [dict(training.model.named_parameters()) for training in both]
    torch.testing.assert_close(*weights, atol=10 * tolerance, rtol=tolerance)
    return both[0]


LIMITS = {"translation": {"max_source_positions": 16, "max_target_positions": 16}}
BATCHES = [(2, 16), (3, 8), (2, 16), (1, 8), (3, 8), (3, 8), (2, 16)]


@pytest.mark.parametrize("name", MODELS)
def test_updates_equal_eager_ones(name):
    events = [("update", BATCHES[i % len(BATCHES)]) for i in range(200 if name == "language model" else 12)]
    assert assert_equal_training(name, events, **DROPOUT, **LIMITS.get(name, {})).graphs()


batches = st.tuples(st.integers(1, 2), st.sampled_from([1, 8, 13]), st.integers(0, 1))
EVENTS = {"update": 2, "validate": 1, "forward_twice": 2, "forget": 1}


@st.composite
def events(draw):
    method = draw(st.sampled_from(list(EVENTS)))
    return (method, *(draw(batches) for _ in range(EVENTS[method])))


@pytest.mark.parametrize("name", ["translation", "language model", "classifier", "masked language model"])
@given(happening=st.lists(events(), min_size=4, max_size=10))
@examples(6)
def test_any_order_of_passes_equals_eager_ones(name, happening):
    assert_equal_training(name, happening, 1e-5)


def test_gradients_that_a_later_replay_overwrites_are_detected(monkeypatch):
    monkeypatch.setattr(torch, "_foreach_mul", lambda tensors, factor: [t.detach() for t in tensors])
    with pytest.raises(AssertionError):
        assert_equal_training("language model", [("update", (2, 8), (2, 8, 1))] * 4)


def test_a_graph_in_use_by_another_pass_is_detected(monkeypatch):
    original = train_graph.TrainGraphs.ready_for

    def forgets(graphs, *args):
        graphs.use = lambda: None
        return original(graphs, *args)

    monkeypatch.setattr(train_graph.TrainGraphs, "ready_for", forgets)
    with pytest.raises(RuntimeError, match="cuda-graphs"):
        assert_equal_training("language model", [("forward_twice", (2, 8), (2, 8))] * 4)


@pytest.mark.parametrize("name", ["translation", "language model"])
def test_operations_outside_of_graphs_do_not_grow_with_the_layers(name, monkeypatch):
    counts = []
    for layers in (1, 3):
        with Operations() as operations:
            monkeypatch.setattr(train_graph, "capture_on", lambda device, used=operations: used.capture)
            training = Training(name, True, decoder_layers=layers)
            for _ in range(3):
                before = operations.count
                training.loss(2, 8).backward()
                training.model.zero_grad()
            counts.append(operations.count - before)
    assert counts[0] == counts[1] < 60


# ------------------------------------------------------------------------------------------- without graphs


def assert_eager(reason, caplog, name="language model", repeats=4, change=lambda model: None, **options):
    training = Training(name, True, **options)
    change(training.model)
    with caplog.at_level(logging.INFO):
        for _ in range(repeats):
            training.update((2, 8))
    assert not training.graphs()
    (record,) = (record for record in caplog.records if reason in record.message)
    return record.levelname


@pytest.mark.parametrize("option", [{"decoder_layerdrop": 0.5}, {"checkpoint_activations": True}])
def test_options_that_change_the_passes_train_without_graphs(option, caplog):
    assert assert_eager(next(iter(option)).replace("_", "-"), caplog, **option) == "INFO"


HOOKED = {
    "layer": lambda decoder, call: decoder.layers[0].feed_forward.register_forward_hook(call),
    "final norm": lambda decoder, call: decoder.final_norm.register_forward_hook(call),
    "weight": lambda decoder, call: next(decoder.layers.parameters()).register_hook(call),
}


@pytest.mark.parametrize("place", HOOKED)
def test_a_hook_is_called_once_in_each_step(place, caplog):
    calls = []
    assert_eager("hooks", caplog, change=lambda model: HOOKED[place](model.decoder, lambda *_: calls.append(1)))
    assert len(calls) == 4


def test_a_hook_of_all_modules_is_called_in_each_step(caplog):
    calls = []
    hook = register_module_forward_hook(lambda module, *_: calls.append(1) if isinstance(module, nn.Linear) else None)
    try:
        assert_eager("hooks", caplog)
    finally:
        hook.remove()
    assert calls


def test_an_operation_that_waits_for_the_gpu_trains_without_graphs(caplog):
    def change(model):
        norm = model.decoder.layers[0].mixer.norm
        norm.forward, plain = (lambda x, *rest: plain(x * x.abs().amax().item() ** 0, *rest)), norm.forward

    assert assert_eager("_local_scalar_dense", caplog, change=change) == "WARNING"


def test_a_capture_that_runs_out_of_memory_is_an_error_of_that_batch_alone(monkeypatch, caplog):
    """fairseq reports the error and goes on with the next batch."""

    def full(steps, pool=None):
        recorded(steps)
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(train_graph, "capture_on", lambda device: full)
    training = Training("classifier", True, normalization_type="batchnorm")
    training.update((2, 8))
    before = copy.deepcopy(training.model.state_dict())
    with pytest.raises(torch.cuda.OutOfMemoryError):
        training.update((2, 8))
    assert all(torch.equal(before[name], tensor) for name, tensor in training.model.state_dict().items())
    training.update((2, 8))
    assert caplog.text.count("out of memory") == 1


def test_weights_that_belong_to_other_modules_get_gradients(caplog):
    """As with FullyShardedDataParallel, whose weights are parts of a tensor that the layers do not have."""
    decoder, weight = language_model().train().decoder, nn.Parameter(torch.tensor(2.0))
    for _ in range(3):
        x = torch.randn(2, 8, 16, requires_grad=True)
        with caplog.at_level(logging.INFO):
            y = decoder.passes.for_batch(decoder, x).form_of(lambda x: weight * decoder.whole(x))(x)
        y.sum().backward()
        assert weight.grad != 0
        weight.grad = None
    assert "parameters" in caplog.text


def test_graphs_are_limited_in_number_and_memory(monkeypatch, caplog):
    monkeypatch.setattr(train_graph, "MOST_GRAPHS", 2)
    training = assert_equal_training("language model", [("update", (i % 4 + 1, 8)) for i in range(16)])
    assert len(training.graphs()) == 2
    shares = iter(x / 10 for x in range(100))
    monkeypatch.setattr(train_graph, "share_of_memory", lambda device: next(shares))
    monkeypatch.setattr(train_graph, "MOST_MEMORY", 0.05)
    assert_eager("memory", caplog)


def move_weights(model):
    for parameter in model.parameters():
        parameter.data = 1.1 * parameter.data


def replace_weights(model):
    for module in model.decoder.layers.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(parameter.data))


CHANGES = {
    "moved weights": move_weights,
    "replaced weights": replace_weights,
    "another chunk size": lambda model: model.decoder.set_chunk_size(3),
    "a layer without dropout": lambda model: model.decoder.layers[0].eval(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_is_captured_again(change):
    losses = []
    for training in (Training("language model", True, **DROPOUT), Training("language model", False, **DROPOUT)):
        torch.manual_seed(3)
        for _ in range(3):
            training.update((2, 8))
        CHANGES[change](training.model)
        training.optimizer = torch.optim.SGD(training.model.parameters(), 0.1)
        losses.append([training.update((2, 8)) for _ in range(4)])
    assert losses[0] == losses[1]


def test_sequences_are_padded_within_the_reach_of_cross_attention():
    lengths = {f"max_{side}_positions": 13 for side in ("source", "target")}
    training = Training("translation", True, encoder_chunk_size=3, **lengths)
    for _ in range(3):
        training.update((2, 12))
    assert training.graphs()
    with pytest.raises(ValueError, match="max_positions"):
        training.update((2, 14))


def test_batches_are_not_padded_if_an_option_prevents_graphs(monkeypatch):
    lengths = []
    monkeypatch.setattr(Stack, "embed", lambda self, tokens: lengths.append(tokens.size(1)) or 1 / 0)
    for layerdrop in (0.0, 0.5):
        with pytest.raises(ZeroDivisionError):
            Training("language model", True, decoder_layerdrop=layerdrop).loss(2, 13)
    assert lengths == [16, 13]


def test_frozen_layers_run_without_a_message(caplog):
    training = Training("language model", True)
    training.model.requires_grad_(False)
    with caplog.at_level(logging.INFO):
        losses = [training.loss(2, 8) for _ in range(4)]
    assert losses == losses[:1] * 4
    assert not caplog.messages


def test_copies_have_no_graphs():
    training = Training("language model", True)
    for _ in range(3):
        training.update((2, 8))
    for other in (copy.deepcopy(training.model), pickle.loads(pickle.dumps(training.model.decoder.passes))):
        assert not getattr(other, "decoder", other).__dict__.get("graphs")
    second = training.loss(2, 8)
    second.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="cuda-graphs"):
        second.backward()


def test_a_deleted_model_is_freed_at_once():
    """Without the garbage collector, which does not know how much memory of a GPU waits for it."""
    training = Training("language model", True)
    for _ in range(3):
        training.update((2, 8))
    assert training.graphs()
    decoder = weakref.ref(training.model.decoder)
    gc.disable()
    try:
        del training
        assert decoder() is None
    finally:
        gc.enable()


def test_lengths_are_padded_by_an_eighth_at_most():
    for length in range(65, 5000):
        assert length <= bucket(length, 5000) <= length * 9 / 8
    assert len({bucket(length, 1024) for length in range(1, 1025)}) == 16 + 3 * 8
