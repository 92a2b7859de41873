"""What a search says can no longer change is the beginning of what it finds."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mega_runtime.decoder import Candidates, Decoder
from mega_runtime.search import Options, Search, Special
from tests.helpers.exported import CHUNKS, documents
from tests.helpers.profiles import examples

TYPES, SPECIAL = 7, Special(1, 2, 3)


def searched(seed, beams, sentences, ends, steps):
    """A search over random probabilities, where eos is more likely with `ends`: its state after each step."""
    draw, search = np.random.default_rng(seed), Search(np.full(sentences, steps), Options(beams), SPECIAL, None)
    going = np.ones(sentences, bool)
    while going.any():
        logits = draw.normal(0, 2, (sentences * beams, TYPES)).astype(np.float32)
        logits[:, SPECIAL.eos] += ends
        scores = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        types = np.argsort(-scores, 1, kind="stable")
        top = np.take_along_axis(scores, types, 1)
        going = search.step(Candidates(top, types, scores[:, SPECIAL.asked]))
        yield search


def assert_begins(seed, beams, sentences, ends, steps, look):
    """Looks every few steps, at those sentences that are not done; returns how many tokens were certain before."""
    certain = [[] for _ in range(sentences)]
    for search in searched(seed, beams, sentences, ends, steps):
        for sentence in range(sentences) if search.number % look == 0 else ():
            if search.count[sentence] < beams and search.number <= steps:
                certain[sentence] += search.settled(sentence, len(certain[sentence]))
    for sentence, tokens in enumerate(certain):
        for hypothesis in search.hypotheses(sentence):
            assert hypothesis.tokens[: len(tokens)] == tokens
    return sum(map(len, certain))


BEAMS, SENTENCES, STEPS = st.integers(1, 5), st.integers(1, 3), st.integers(1, 30)


@given(st.integers(0, 999), BEAMS, SENTENCES, st.floats(-4, 3), STEPS, st.integers(1, 9))
@examples(200)
def test_certain_tokens_begin_all_hypotheses(seed, beams, sentences, ends, steps, look):
    assert_begins(seed, beams, sentences, ends, steps, look)


def test_most_tokens_are_certain_before_the_end():
    assert assert_begins(seed=0, beams=4, sentences=3, ends=-9.0, steps=60, look=8) > 100


def without_hypotheses(search, sentence, start):
    ends, search.ends[sentence] = search.ends[sentence], []
    tokens = settled(search, sentence, start)
    search.ends[sentence] = ends
    return tokens


def of_one_beam(search, sentence, start):
    closed, search.closed = search.closed, search.closed.copy()
    search.closed[:, 1:] = True
    tokens = settled(search, sentence, start)
    search.closed = closed
    return tokens


settled = Search.settled


@pytest.mark.parametrize("twin", [without_hypotheses, of_one_beam])
def test_tokens_that_may_still_change_are_detected(monkeypatch, twin):
    monkeypatch.setattr(Search, "settled", twin)
    with pytest.raises(AssertionError):
        test_certain_tokens_begin_all_hypotheses()


@pytest.mark.parametrize("option", [{"cross_attention_positions": "sentence"}, {"cross_attention_window": 1}])
def test_lines_of_a_window_come_before_its_search_ends(monkeypatch, option):
    model, steps = documents(ends=2.0, **CHUNKS, **option)[2], []
    step = Decoder.step
    monkeypatch.setattr(Decoder, "step", lambda *call: steps.append(1) or step(*call))
    monkeypatch.setitem(model.config["documents"], "window_tokens", 1000)
    text = [f"w{n} w{n + 1} w{n + 2}" for n in range(1, 20)]
    came = [(line, len(steps)) for _, line, _ in model.stream_documents([text], beam=2)]
    assert [line for line, _ in came] == list(range(len(text)))
    assert came[0][1] < 0.5 * len(steps)
