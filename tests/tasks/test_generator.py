"""The generator of own tasks finds the hypotheses and scores of fairseq's, without waiting for a GPU at each step."""

import functools
from argparse import Namespace

import pytest
import torch
from fairseq.sequence_generator import SequenceGenerator
from hypothesis import given
from hypothesis import strategies as st

from mega_fairseq.acceleration import step_graph
from mega_fairseq.acceleration.step_graph import GraphState
from mega_fairseq.tasks import MegaTranslationConfig, MegaTranslationTask, generator
from mega_fairseq.tasks.beam_search import BeamSearch
from mega_fairseq.tasks.generator import MegaGenerator, Steps
from tests.helpers import commands
from tests.helpers.commands import PLUGIN, SEARCH, SIZES, fairseq, lines, records
from tests.helpers.golden_models import task
from tests.helpers.pretended_device import PretendedDevice, moved
from tests.helpers.profiles import examples
from tests.helpers.small_models import EOS, TYPES, language_model, net_input, stock_transformer, translation_model

WORDS = task(TYPES).target_dictionary
MODELS = {
    "full": (translation_model, {}),
    "chunks": (translation_model, {"decoder_chunk_size": 3, "rel_pos_bias": "rotary", "normalize_before": True}),
    "adaptive": (translation_model, {"adaptive_softmax_cutoff": "10,20"}),
    "no fixed step": (language_model, {"token_mixer": "aft"}),
    "language model": (language_model, {"decoder_chunk_size": 4}),
}


@functools.lru_cache(maxsize=None)
def prepared(name):
    """A model that ends sentences early and late, and gives many words the same probability."""
    build, options = MODELS[name]
    model = build(**options).eval()
    if name != "adaptive":
        projection = model.decoder.output_projection or model.decoder.embed_tokens
        with torch.no_grad():
            projection.weight[10:20] = projection.weight[20:30]
            projection.weight[EOS] += projection.weight[EOS]
    model.make_generation_fast_()
    return model


def sample(lengths, seed=0):
    random = torch.Generator().manual_seed(seed)
    return {"net_input": net_input([torch.randint(4, TYPES, (length,), generator=random) for length in lengths])}


def both(name, batch, **options):
    """The hypotheses of fairseq's generator and of ours."""
    model = prepared(name)
    return [kind([model], WORDS, **options).generate([model], batch) for kind in (SequenceGenerator, MegaGenerator)]


def assert_equal(theirs, ours, exact):
    assert len(theirs) == len(ours)
    for one, other in zip(theirs, ours):
        assert len(one) == len(other) > 0
        for expected, hypothesis in zip(one, other):
            assert list(expected) == list(hypothesis)
            tolerance = {"atol": 0, "rtol": 0} if exact else {"atol": 2e-6, "rtol": 1e-5}
            for key in expected:
                torch.testing.assert_close(hypothesis[key], expected[key], **tolerance)


@st.composite
def searches(draw):
    options = {
        "beam_size": draw(st.integers(1, 5)),
        "max_len_a": draw(st.sampled_from([0, 0.5])),
        "max_len_b": draw(st.integers(3, 16)),
        "min_len": draw(st.integers(0, 3)),
        "normalize_scores": draw(st.booleans()),
        "len_penalty": draw(st.sampled_from([0.5, 1.0, 1.7])),
        "unk_penalty": draw(st.sampled_from([0.0, -2.0])),
        "temperature": draw(st.sampled_from([0.6, 1.0, 2.0])),
    }
    return sample(draw(st.lists(st.integers(1, 9), min_size=1, max_size=6)), draw(st.integers(0, 99))), options


@pytest.mark.parametrize("name", ["chunks", "adaptive", "language model"])
@given(search=searches())
@examples(25)
def test_hypotheses_and_scores_are_those_of_fairseq(name, search):
    batch, options = search
    assert_equal(*both(name, batch, **options), exact=True)


def run_once(steps):
    """Stands in for `cuda_graphs`, which runs each step before it captures it."""
    for step in steps:
        step()
    return steps


@pytest.fixture
def graphs(monkeypatch):
    """Stands in for a GPU: the same storage, steps and looks, without graphs."""
    monkeypatch.setattr(step_graph, "capture_on", lambda device: run_once)
    monkeypatch.setattr(step_graph, "FIRST_CAPACITY", 4)
    monkeypatch.setattr(generator, "steps_between_looks", lambda device: 3)


@pytest.mark.parametrize("name", MODELS)
def test_hypotheses_and_scores_are_those_of_fairseq_in_graphs(name, graphs):
    @given(search=searches())
    @examples(25)
    def check(search):
        batch, options = search
        assert_equal(*both(name, batch, **options), exact=False)

    check()


BATCH, MANY = sample([7, 3, 5, 9, 2, 6]), {"beam_size": 4, "max_len_b": 16}


def test_a_search_moves_to_smaller_graphs_as_sentences_finish(graphs, monkeypatch):
    sizes, get = [], step_graph.StepGraphs.get
    monkeypatch.setattr(step_graph.StepGraphs, "get", lambda *call: sizes.append(call[-1]) or get(*call))
    model = prepared("chunks")
    ours = MegaGenerator([model], WORDS, **MANY).generate([model], BATCH)
    assert len({len(hypothesis["tokens"]) for each in ours for hypothesis in each}) > 4
    assert len({size.tokens for size in sizes}) > 1
    assert len({size.rows for size in sizes}) > 1
    eager = []
    monkeypatch.setattr(model.decoder, "next_tokens", lambda *call: eager.append(call))
    again = MegaGenerator([model], WORDS, **MANY).generate([model], BATCH)
    assert not eager  # the graphs of the search before also take the first step
    assert_equal(ours, again, exact=False)


@pytest.mark.parametrize("name", ["totals", "words"])
def test_a_search_that_forgets_a_part_of_its_state_is_detected(graphs, monkeypatch, name):
    load = BeamSearch.load

    def forgetful(self, *arguments):
        new = BeamSearch(*self.rows.shape, self.steps, self.rules, self.rows.device).state[name]
        load(self, *arguments).state[name].copy_(new)
        return self

    monkeypatch.setattr(BeamSearch, "load", forgetful)
    theirs, ours = both("chunks", BATCH, **MANY)
    with pytest.raises(AssertionError):
        assert_equal(theirs, ours, exact=False)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"sampling": True}, "--sampling"),
        ({"diverse_beam_groups": 2}, "--diverse-beam-groups"),
        ({"match_source_len": True}, "--match-source-len"),
        ({"no_repeat_ngram_size": 2}, "--no-repeat-ngram-size"),
        ({"prefix": True}, "--prefix-size"),
        ({"models": 2}, "--path"),
        ({"stock": True}, "TransformerModel"),
    ],
    ids=str,
)
def test_options_of_fairseqs_generator_run_there_and_are_logged_once(options, name, caplog, monkeypatch):
    monkeypatch.setattr(generator, "logged", set())
    model, words = prepared("chunks"), Namespace(beam=4, max_len_b=12, **options)
    if "stock" in options:
        model = stock_transformer()
    models = [model] * options.get("models", 1)
    prefix = BATCH["net_input"]["src_tokens"][:, -2:] if "prefix" in options else None
    ours = MegaTranslationTask(MegaTranslationConfig(), WORDS, WORDS)
    found = []
    for build in (super(MegaTranslationTask, ours).build_generator, ours.build_generator):
        built = build(models, words)
        for _ in range(2):
            torch.manual_seed(0)
            result = built.generate(models, BATCH, prefix_tokens=prefix)
        found.append(result)
    assert type(built) is MegaGenerator
    assert_equal(*found, exact=True)
    assert caplog.text.count("generating with fairseq's search") == 1
    assert name in caplog.text


def test_a_search_on_a_gpu_waits_for_it_only_at_looks(monkeypatch):
    monkeypatch.setattr(step_graph, "capture_on", lambda device: list)
    with PretendedDevice() as device:
        model, waits = moved(translation_model().eval()), []
        model.make_generation_fast_()
        for length in (11, 19):  # a look every 8 steps
            batch = {name: moved(part) for name, part in BATCH["net_input"].items()}
            ours = MegaGenerator([model], WORDS, beam_size=3, max_len_b=length, min_len=length)
            ours.generate([model], {"net_input": batch})
            device.waits.clear()
            ours.generate([model], {"net_input": batch})
            waits.append(len(device.waits))
        assert waits[1] - waits[0] == 2  # what is done, and whether all numbers are finite


@pytest.mark.parametrize("in_graphs", [False, True])
def test_a_diverged_model_is_reported(in_graphs, request, monkeypatch):
    if in_graphs:
        request.getfixturevalue("graphs")
    model = translation_model().eval()
    model.make_generation_fast_()
    searching = MegaGenerator([model], WORDS, **MANY)
    run, calls = Steps.run, []

    def diverge(self, last):
        calls.append(last)
        if len(calls) == 7:
            with torch.no_grad():
                model.decoder.embed_tokens.weight.fill_(float("nan"))
        run(self, last)

    monkeypatch.setattr(Steps, "run", diverge)
    with pytest.raises(FloatingPointError, match="--lr"):
        searching.generate([model], BATCH)
    assert len(calls) < 12


@pytest.fixture
def overflow(graphs, monkeypatch):
    """Makes one score NaN in one step of a search in graphs, and in no other step."""
    monkeypatch.setattr(generator, "steps_between_looks", lambda device: 8)
    advance = GraphState.advance

    def at(number):
        def advance_once(self):
            advance(self)
            if self.length == number:
                self.graph.scores[0, 7] = float("nan")

        monkeypatch.setattr(GraphState, "advance", advance_once)

    return at


SHORT = {"beam_size": 2, "max_len_b": 5, "min_len": 5}


@pytest.mark.parametrize("step", [2, 3, 6])  # the first step in a graph, another, and the last of six
@pytest.mark.parametrize("options", [{}, {"no_repeat_ngram_size": 9}], ids=["ours", "theirs"])
def test_scores_that_are_nan_in_one_step_are_reported_at_the_end_of_a_short_search(overflow, options, step):
    searching = MegaGenerator([prepared("full")], WORDS, **SHORT, **options)
    overflow(step)
    with pytest.raises(FloatingPointError, match="--lr"):
        searching.generate([prepared("full")], BATCH)
    overflow(None)
    searching.generate([prepared("full")], BATCH)


@pytest.mark.parametrize("step", [3, 6])
def test_a_stock_search_logs_scores_that_were_nan_and_the_next_one_raises_an_error(overflow, caplog, step):
    searching = SequenceGenerator([prepared("full")], WORDS, **SHORT)
    overflow(step)
    searching.generate([prepared("full")], BATCH)
    assert caplog.text.count("--lr") == 1
    overflow(None)
    with pytest.raises(FloatingPointError, match="--lr"):
        searching.generate([prepared("full")], BATCH)
    searching.generate([prepared("full")], BATCH)
    assert caplog.text.count("--lr") == 1


@pytest.mark.slow
def test_fairseq_generate_prints_the_same_with_both_tasks():
    trained = commands.trained("translation")
    said = []
    for options in (["--task=translation", "--required-batch-size-multiple=1"], ["--task=mega_translation"]):
        words = [trained.data, *PLUGIN, "--cpu", *SEARCH, "--path", trained.last, "--batch-size=7", "--nbest=2"]
        said.append(fairseq("generate", *words, *options))
    for letter in "SHDP":
        each = [list(lines(output, letter)) for output in said]
        assert each[0] == each[1]
        assert each[0]
    assert "fairseq's search" not in said[1]


@pytest.mark.slow
def test_only_batches_of_the_training_are_multiples(tmp_path):
    trained = commands.trained("translation")
    words = [word for word in trained.words if word not in ("--required-batch-size-multiple", 1)]
    words += ["--task=mega_translation", "--batch-size=20", "--max-update=2"]
    said = fairseq("train", trained.data, *words, "--save-dir", tmp_path)
    assert [record["bsz"] for record in records(said, "train_inner")] == [16, 16]
    assert [record["valid_bsz"] for record in records(said, "valid")] == [SIZES["valid"] / 2]  # two batches
