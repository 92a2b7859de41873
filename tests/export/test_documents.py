"""Documents: the runtime's rules and places of lines are the project's, and no line is lost or added."""

from argparse import Namespace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mega_fairseq.export import folder
from mega_fairseq.tasks.line_counts import LineSearch, keep_lines
from mega_runtime.lines import LineRules, Places, split
from mega_runtime.translator import Translator, windows
from tests.helpers.exported import CHUNKS, documents, ours, translation
from tests.helpers.golden_models import PAD
from tests.helpers.hypotheses import assert_lines, assert_same, plain
from tests.helpers.profiles import examples
from tests.helpers.small_models import (
    EOS,
    SEPARATOR,
    SEPARATORS,
    TYPES,
    documents_task,
    net_input,
    translation_model,
    windows_of,
)

MODELS = {
    "by token": {"normalize_before": True, "ends": 1.0},
    "by sentence": {"cross_attention_positions": "sentence", "ends": 2.0, **CHUNKS},
    "window": {"cross_attention_window": 1, "ends": -2.0, **CHUNKS},
    "both": {"cross_attention_window": 0, "cross_attention_positions": "sentence", "rel_pos_bias": "t5"},
}
each = pytest.mark.parametrize("name", MODELS)
LINES = st.lists(st.integers(1, 7), min_size=1, max_size=6)
BATCHES = st.lists(LINES, min_size=1, max_size=4)
CASE = [[3, 1, 4], [2], [5, 2, 2, 1, 6]]


# ------------------------------------------------------------------------------------------- rules


@given(LINES, st.sampled_from([0.0, 0.5, 2.0]), st.sampled_from([0.0, 1.5, 20.0]), st.integers(0, 60), st.data())
@examples(60)
def test_rules_allow_what_the_projects_rules_allow(lengths, a, b, more, data):
    beams, limit = 3, 2 * len(lengths) + more
    (source,) = windows_of([lengths])
    theirs = LineSearch(documents_task().target_dictionary, (SEPARATOR, SEPARATOR), a, b)
    most = theirs.begin(torch.tensor([source]), limit)
    rules = LineRules([source], SEPARATOR, SEPARATOR, a, b, limit, beams)
    assert rules.limit.tolist() == [most]
    assert rules.left[0].tolist() == [int(theirs.lines.left)] * beams
    number = data.draw(st.integers(0, most))
    beam = st.lists(st.integers(0, 9), min_size=beams, max_size=beams)
    rules.left, rules.length = (np.array([data.draw(beam)]) for _ in range(2))
    rules.left = np.minimum(rules.left, len(lengths) - 1)
    log_probs = torch.zeros(1, beams, TYPES)
    left, length = torch.tensor(rules.left), torch.tensor(rules.length)
    keep_lines(log_probs, (SEPARATOR, EOS), left, length, theirs.lines.longest, torch.tensor([[most - number]]))
    special = np.zeros((beams, 3), np.float32)
    rules.apply(special, number)
    assert np.array_equal(special, log_probs[0][:, [EOS, 3, SEPARATOR]])
    assert np.array_equal(rules.full(number)[0], log_probs[0, :, 10].numpy() == -np.inf)


@given(BATCHES, st.booleans(), st.integers(0, 9))
@examples(30)
def test_places_are_those_of_the_project(batch, within, seed):
    options = {"cross_attention_positions": "sentence"} if within else {"cross_attention_window": 2}
    model, beams, draw = translation_model(**options), 2, np.random.default_rng(seed)
    model.decoder.separators = (SEPARATOR, SEPARATORS[1])
    tokens = net_input(windows_of(batch, seed), left=False)["src_tokens"]
    table = {"source_separator": SEPARATOR, "target_separator": SEPARATORS[1], "within_lines": within, "near": 2}
    table.update(window=2, first=-9, width=20)
    found = Places(tokens.numpy(), tokens.ne(PAD).numpy(), table, beams)
    before = model.decoder.first_segments(tokens)
    real = tokens.ne(PAD).numpy()
    for source, place in zip(found.source, before.keys.unbind(-1)):
        assert np.array_equal(source[:, 0][real], place.numpy()[real])
    before = before._replace(queries=before.queries.expand(len(tokens) * beams, -1, -1))
    new, parents = np.full((len(tokens), beams), EOS), np.tile(np.arange(beams), (len(tokens), 1))
    for _ in range(8):
        found.advance(new, parents, np.zeros((len(tokens), beams, tokens.size(1)), np.int64))
        rows = torch.tensor((parents + beams * np.arange(len(tokens))[:, None]).ravel())
        before = model.decoder.segments(torch.tensor(new).view(-1, 1), before.select(rows, None)).last()
        line, offset = before.queries[:, 0].unbind(-1)
        assert np.array_equal(found.line.ravel(), line)
        assert np.array_equal(found.offset.ravel(), offset)
        new, parents = draw.choice([SEPARATORS[1], 9, EOS], new.shape), draw.integers(0, beams, new.shape)


# ------------------------------------------------------------------------------------------- searches


def of_project(name, row, beam):
    task, model, _ = documents(**MODELS[name])
    generator = task.build_generator([model], Namespace(beam=beam))
    return plain(task.inference_step(generator, [model], {"net_input": net_input([row])}))


@each
def test_windows_in_batches_have_the_hypotheses_of_the_project_alone(name):
    @given(BATCHES, st.integers(1, 5), st.integers(0, 9))
    @examples(8)
    def check(batch, beam, seed):
        rows = windows_of(batch, seed)
        found = ours(documents(**MODELS[name])[2], rows, beam=beam)
        assert_lines(batch, found, 0.5, 3.0)
        for row, alone in zip(rows, found):
            assert_same([alone], of_project(name, row, beam))

    check()


@pytest.mark.parametrize("ends", [-50.0, 0.0, 50.0])
@pytest.mark.parametrize("positions", [48, 400])
def test_hypotheses_have_the_lines_of_their_source_whatever_the_model_prefers(positions, ends):
    """Also if their lines together would be too long for the model."""

    @given(BATCHES, st.integers(1, 5))
    @examples(8)
    def check(batch, beam):
        found = ours(limited(positions, ends), windows_of(batch), beam=beam)
        assert_lines(batch, found, 1.0, 6.0)
        assert all(len(tokens) <= positions for each in found for tokens, _ in each)

    check()


def limited(positions, ends=0.0):
    limits = {"max_source_positions": positions, "max_target_positions": positions}
    return documents(a=1.0, b=6.0, window=40, ends=ends, **limits)[2]


@pytest.mark.parametrize(("positions", "ends", "texts"), [(48, -50.0, 2), (400, -50.0, 0), (48, 50.0, 0)])
def test_lines_that_are_shortened_for_lack_of_positions_are_reported(caplog, positions, ends, texts):
    ours(limited(positions, ends), windows_of([[9, 9, 9, 9], [1, 1], [8, 8, 8, 8]]), beam=2)
    assert [f"were shortened in {texts} of" in record.getMessage() for record in caplog.records] == [True] * (texts > 0)


def test_windows_are_no_longer_than_what_the_graphs_read(monkeypatch):
    monkeypatch.setattr(folder, "UNLIMITED", 24)
    translator = documents(a=1.0, b=1.0, window=40, **CHUNKS)[2]
    assert translator.config["documents"]["window_tokens"] == 24
    assert len(translator.translate_documents([["w1 w2 w3"] * 20], beam=1)[0]) == 20


def test_more_lines_than_the_model_can_write_are_refused():
    model = limited(48)
    assert_lines([[1] * 24], ours(model, windows_of([[1] * 24])), 0.5, 3.0)
    with pytest.raises(ValueError, match="25 lines .* 47 tokens; give shorter windows"):
        model.search(windows_of([[1] * 25]))


def lines_may_be_blank(monkeypatch):
    apply = LineRules.apply

    def blank(self, *call):
        length, self.length = self.length, self.length + 1
        apply(self, *call)
        self.length = length

    monkeypatch.setattr(LineRules, "apply", blank)


def lines_do_not_follow_the_beams(monkeypatch):
    advance = LineRules.advance
    monkeypatch.setattr(LineRules, "advance", lambda self, tokens, parents: advance(self, tokens, np.sort(parents) * 0))


def lines_of_sentences_that_left(monkeypatch):
    keep = LineRules.keep
    monkeypatch.setattr(LineRules, "keep", lambda self, staying: keep(self, np.arange(len(staying))))


@pytest.mark.parametrize(
    ("twin", "ends"),
    [(lines_may_be_blank, 50.0), (lines_do_not_follow_the_beams, 2.0), (lines_of_sentences_that_left, 2.0)],
)
def test_other_rules_are_detected(monkeypatch, twin, ends):
    model = documents(ends=ends, **CHUNKS)[2]
    assert_lines(CASE, ours(model, windows_of(CASE)), 0.5, 3.0)
    twin(monkeypatch)
    with pytest.raises(AssertionError):
        assert_lines(CASE, ours(model, windows_of(CASE)), 0.5, 3.0)


# ------------------------------------------------------------------------------------------- text


WORDS = st.lists(st.sampled_from(["w1", "w2", "w30", "other"]), min_size=0, max_size=9)
DOCUMENTS = st.lists(st.lists(WORDS, max_size=8), max_size=4)


@given(DOCUMENTS, st.sampled_from([10, 60]))
@examples(25)
def test_windows_are_those_of_the_project(texts, limit):
    task = documents_task(window_tokens=limit)
    encoded = [[[*map(task.source_dictionary.index, line), EOS] for line in text if line] for text in texts]
    joined = task.windows([[torch.tensor(line) for line in text] for text in encoded])
    found = [window for text in encoded for window in windows(text, limit)]
    assert [split(window[:-1].tolist(), SEPARATOR) for window in joined] == [
        [line[:-1] for line in window] for window in found
    ]


@given(DOCUMENTS, st.sampled_from(["by token", "both"]))
@examples(15)
def test_translated_documents_have_a_line_for_each_line(texts, name):
    given_lines = [[" ".join(line) for line in text] for text in texts]
    found = documents(**MODELS[name])[2].translate_documents(given_lines, beam=2)
    assert [[bool(line) for line in text] for text in found] == [[bool(line) for line in text] for text in given_lines]


def test_documents_are_translated_window_by_window_in_any_batches(monkeypatch):
    model = documents(**MODELS["by sentence"])[2]
    texts = [["w1 w2", "", "w3 " * 20, "w4 w5 w6"], ["w7"], ["w8 w9 " * 9, " \t", "w10 " * 11]]
    found = model.translate_documents(texts)
    for size in (1, 60, 10_000):
        monkeypatch.setattr(model, "batch_tokens", size)
        assert model.translate_documents(iter(texts)) == found
    streamed = [[""] * len(text) for text in texts]
    for number, line, text in model.stream_documents(texts):
        streamed[number][line] = text
    assert streamed == found
    assert model.translate_documents([np.array(lines) for lines in texts]) == found


@pytest.mark.parametrize(
    ("texts", "error", "words"),
    [
        ("w1 w2", TypeError, "list of documents"),
        (["w1 w2", "w3"], TypeError, "list of documents"),
        ([["w1"], ["w2", "w1 <sep> w3"]], ValueError, "line 3 has <sep>"),
        ([["w1"], None], TypeError, "a document is of type NoneType; give a list of lines"),
        ([[b"w1"]], TypeError, "line 1 is of type bytes"),
        ([["w1"], ["w2", "w1 " * 500]], ValueError, "line 3 has 501 tokens and the model reads 400"),
    ],
)
def test_texts_that_are_no_documents_are_refused(texts, error, words):
    model = documents(**MODELS["by token"])[2]
    with pytest.raises(error, match=words):
        model.translate_documents(texts)
    with pytest.raises(error, match=words):
        list(model.stream_documents(texts))


@pytest.mark.parametrize("options", [{"max_len_a": 1.0}, {"max_len_b": 3}])
def test_lengths_of_lines_are_those_of_the_folder(options):
    model = documents(**MODELS["by token"])[2]
    for call in (partial(model.translate, ["w1"]), partial(Translator, model.folder.path)):
        with pytest.raises(ValueError, match="not for models of documents; .* at most 0.5 n [+] 3 tokens"):
            call(**options)


def test_a_model_of_single_lines_refuses_documents():
    with pytest.raises(ValueError, match="single lines; .*--task mega_document_translation"):
        translation()[1].translate_documents([["w1"]])


def test_a_window_of_one_line_is_translated_as_a_line():
    model = documents(**MODELS["by token"])[2]
    assert [line.text for line in model.translate(["w1 w2", "", "w3"])] == [
        text for (text,) in model.translate_documents([["w1 w2"], [""], ["w3"]])
    ]
