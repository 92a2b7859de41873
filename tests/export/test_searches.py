"""The runtime finds the hypotheses of fairseq's search, with their scores."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mega_fairseq.export.folder import write_translation
from mega_runtime import Translator
from mega_runtime.search import Search
from tests.helpers.exported import CHUNK, SEARCHED, documents, new_folder, ours, sharpened, sources, theirs, translation
from tests.helpers.hypotheses import assert_same
from tests.helpers.profiles import examples
from tests.helpers.small_models import EOS, TYPES, translation_model

each = pytest.mark.parametrize("name", SEARCHED)
LENGTHS = [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 1, 31]


@st.composite
def searches(draw):
    """The lengths of a batch, and options. Only the runtime limits each sentence by its own length, so a is 0."""
    options = {
        "beam": draw(st.integers(1, 6)),
        "max_len_b": draw(st.sampled_from([1, 3, CHUNK - 1, CHUNK, 2 * CHUNK + 1])),
        "min_len": draw(st.integers(0, 4)),
        "lenpen": draw(st.sampled_from([0.0, 0.5, 1.0, 1.7])),
        "unkpen": draw(st.sampled_from([0.0, -3.0, 2.0])),
    }
    options["min_len"] = min(options["min_len"], options["max_len_b"])
    lengths = draw(st.lists(st.sampled_from(LENGTHS), min_size=1, max_size=5))
    return sources(*lengths, seed=draw(st.integers(0, 99))), options


def test_a_source_whose_numbers_overflow_does_not_spoil_the_next():
    model, folder = sharpened(translation_model(output_bias=True), 2.0, 1.0), new_folder()
    with torch.no_grad():
        model.encoder.embed_tokens.weight[TYPES - 1] = 1e19
    write_translation(folder, model)
    translator, rows = Translator(folder), sources(3, 9)
    before = ours(translator, rows)
    with pytest.raises(FloatingPointError, match="not numbers"):
        translator.search([[TYPES - 1, EOS]])
    assert ours(translator, rows) == before


@each
@given(case=searches())
@examples(20)
def test_hypotheses_and_scores_are_those_of_fairseqs_search(name, case):
    (rows, options), (model, translator) = case, translation(**SEARCHED[name])
    found = ours(translator, rows, **options)
    assert all(len(tokens) <= options["max_len_b"] + 1 and tokens[-1] == EOS for each in found for tokens, _ in each)
    assert_same(found, theirs(model, rows, **options))


@pytest.mark.parametrize("length", LENGTHS)
def test_the_length_of_a_sentence_limits_its_own_translation(length):
    """Also among longer ones, where fairseq takes the longest source of the batch."""
    model, translator = translation(**SEARCHED["no ends"])
    rows = sources(length, 30, 3)
    options = {"beam": 3, "max_len_a": 0.7, "max_len_b": 2}
    found = ours(translator, rows, **options)
    for row, alone in zip(rows, found):
        assert_same([alone], theirs(model, [row], **options))


@pytest.mark.parametrize(("source", "target"), [(30, 20), (20, 30), (16, 16)])
@pytest.mark.parametrize("bias", ["simple", "t5"])
def test_sources_and_translations_as_long_as_the_model_allows(bias, source, target):
    limits = {"max_source_positions": source, "max_target_positions": target}
    model, translator = translation(ends=-50.0, rel_pos_bias=bias, **limits)
    longest = [min(most, 101) for most in model.max_positions()]
    rows, options = sources(longest[0], 3), {"beam": 3, "max_len_b": 100}
    found = ours(translator, rows, **options)
    assert_same(found, theirs(model, rows, **options))
    if bias == "simple":  # the others have no limit but that of the graphs' tables
        for endless in (float("inf"), 10**400):
            assert ours(translator, rows, beam=3, max_len_a=endless) == found
    assert {len(tokens) for each in found for tokens, _ in each} == {longest[1]}
    assert translator.config["limits"] == dict(zip(("source", "target"), (min(n, 8192) for n in model.max_positions())))


@each
def test_these_models_end_their_hypotheses_early_and_late(name):
    found = ours(translation(**SEARCHED[name])[1], sources(*LENGTHS), max_len_b=40)
    lengths = {len(tokens) for each in found for tokens, _ in each}
    assert lengths == {41} if name == "no ends" else len(lengths) > 7


@pytest.mark.parametrize("beam", [12, 17, 19, 25])
def test_wide_beams(beam):
    """Up to more than half of the dictionary."""
    model, translator = translation(**SEARCHED["whole"])
    options, rows = {"beam": beam, "max_len_b": 5}, sources(4, 9)
    assert_same(ours(translator, rows, **options), theirs(model, rows, **options))


def test_large_length_penalties_only_change_the_order():
    """Also where powers of the lengths are larger than numbers of 32 bits."""
    translator, rows, tried = translation(**SEARCHED["laplace"])[1], sources(*LENGTHS), {}
    for lenpen in (0, 50):
        found = [pair for each in ours(translator, rows, max_len_b=40, lenpen=lenpen) for pair in each]
        tried[lenpen] = sorted((tokens, score * len(tokens) ** lenpen) for tokens, score in found)
    assert max(len(tokens) for tokens, _ in tried[0]) > 6
    assert [tokens for tokens, _ in tried[50]] == [tokens for tokens, _ in tried[0]]
    assert [score for _, score in tried[50]] == pytest.approx([score for _, score in tried[0]], rel=1e-12)


# ------------------------------------------------------------------------------------------- broken twins


def ignoring_min_len(monkeypatch):
    special = Search._special

    def short(self, *call):
        number, self.number = self.number, 99
        scores = special(self, *call)
        self.number = number
        return scores

    monkeypatch.setattr(Search, "_special", short)


def with_penalties_of_the_end(monkeypatch):
    special = Search._special

    def penalised(self, *call):
        return special(self, *call) - np.array([self.options.unkpen, 0], np.float32)

    monkeypatch.setattr(Search, "_special", penalised)


def without_totals(monkeypatch):
    step = Search.step

    def forgetful(self, found):
        self.totals = self.totals * 0
        return step(self, found)

    monkeypatch.setattr(Search, "step", forgetful)


@pytest.mark.parametrize("twin", [ignoring_min_len, with_penalties_of_the_end, without_totals])
def test_another_search_is_detected(monkeypatch, twin):
    model, translator = translation(**SEARCHED["laplace"])
    rows, options = sources(*LENGTHS), {"beam": 4, "min_len": 3, "max_len_b": 12, "unkpen": 1.0}
    expected = theirs(model, rows, **options)
    assert_same(ours(translator, rows, **options), expected)
    twin(monkeypatch)
    with pytest.raises(AssertionError):
        assert_same(ours(translator, rows, **options), expected)


# ------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"beam": 0}, "beam is 0"),
        ({"min_len": -1}, "min_len is -1"),
        ({"max_len_a": -1.0}, "max_len_a is -1.0"),
        ({"max_len_b": -1}, "max_len_b is -1"),
        ({"min_len": 9, "max_len_b": 8}, "min_len is 9 .* at most 8 tokens"),
        ({"beam": "2"}, "beam is '2'; give a whole number"),
        ({"beam": 2.5}, "beam is 2.5; give a whole number"),
        ({"beam": TYPES}, f"beam is {TYPES} and the model has {TYPES} types"),
        ({"lenpen": float("nan")}, "lenpen is nan"),
        ({"lenpen": -1.0}, "lenpen is -1.0"),
        ({"lenpen": 51}, "from 0 to 50"),
        ({"max_len_b": 10**400}, "from 0 to 2,147,483,647"),
        ({"unkpen": float("-inf")}, "unkpen is -inf"),
        ({"unkpen": -1e39}, r"unkpen is -1e\+39; give a number from -1e\+30 to 1e\+30$"),
        ({"unkpen": 10**400}, "unkpen is 1000"),
    ],
)
def test_options_that_no_search_can_follow_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        translation()[1].search(sources(4), **options)


def test_options_may_be_numbers_of_numpy():
    search = translation()[1].search
    assert search(sources(4), beam=np.int8(3), lenpen=np.float32(0.5)) == search(sources(4), beam=3, lenpen=0.5)


def test_an_unknown_option_is_refused():
    """Also if there is nothing to search."""
    translator, of_documents = translation()[1], documents()[2]
    for search, empty in (
        (translator.search, sources(4)),
        (translator.translate, []),
        (translator.translate_paragraphs, [""]),
        (of_documents.translate_documents, [[""]]),
    ):
        with pytest.raises(TypeError, match="beams is not an option: give beam, lenpen"):
            search(empty, beams=3)


@pytest.mark.parametrize("name", ["threads", "batch_tokens", "buffer_size"])
@pytest.mark.parametrize("value", [0, "2", 1.5, 10**20])
def test_numbers_of_threads_and_tokens_are_checked(name, value):
    with pytest.raises(ValueError, match=f"{name} is {value!r}"):
        Translator(translation()[1].folder.path, **{name: value})
