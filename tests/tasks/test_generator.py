"""The generator of own tasks finds the hypotheses and scores of fairseq's, without waiting for a GPU at each step."""

import functools
from argparse import Namespace

import pytest
import torch
from fairseq.models.transformer import TransformerConfig, TransformerModelBase
from fairseq.search import BeamSearch as FairseqBeamSearch
from fairseq.sequence_generator import SequenceGenerator
from hypothesis import given, settings
from hypothesis import strategies as st

from mega_fairseq.models import step_graph
from mega_fairseq.models.decoder import STATE
from mega_fairseq.models.step_graph import GraphState
from mega_fairseq.tasks import MegaTranslationConfig, MegaTranslationTask, generator
from mega_fairseq.tasks.beam_search import BeamSearch
from mega_fairseq.tasks.generator import MegaGenerator, Steps
from tests.helpers import commands
from tests.helpers.commands import CPU, PLUGIN, SEARCH, fairseq, lines
from tests.helpers.golden_models import PAD, task
from tests.helpers.pretended_device import PretendedDevice, moved
from tests.helpers.small_models import EOS, TYPES, language_model, translation_model

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
    tokens = torch.full((len(lengths), max(lengths)), PAD)
    for row, length in zip(tokens, lengths):
        row[-length:] = torch.randint(4, TYPES, (length,), generator=random)
    return {"net_input": {"src_tokens": tokens, "src_lengths": torch.tensor(lengths)}}


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


@pytest.mark.parametrize("name", MODELS)
@given(search=searches())
@settings(max_examples=25, deadline=None)
def test_hypotheses_and_scores_are_those_of_fairseq(name, search):
    batch, options = search
    assert_equal(*both(name, batch, **options), exact=True)


@pytest.fixture
def graphs(monkeypatch):
    """Stands in for a GPU: the same storage, steps and looks, without graphs."""
    monkeypatch.setattr(step_graph, "capture_on", lambda device: list)
    monkeypatch.setattr(step_graph, "FIRST_CAPACITY", 4)
    monkeypatch.setattr(generator, "steps_between_looks", lambda device: 3)


@pytest.mark.parametrize("name", MODELS)
def test_hypotheses_and_scores_are_those_of_fairseq_in_graphs(name, graphs):
    @given(search=searches())
    @settings(max_examples=25, deadline=None)
    def check(search):
        batch, options = search
        assert_equal(*both(name, batch, **options), exact=False)

    check()


BATCH, MANY = sample([7, 3, 5, 9, 2, 6]), {"beam_size": 4, "max_len_b": 16}
