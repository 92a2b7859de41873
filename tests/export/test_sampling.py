"""Language models continue texts: what is drawn, where it ends, and parts that together are the whole."""

import math
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from itertools import zip_longest

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mega_runtime.language_model import chosen
from mega_runtime.text import Pieces, Types, Words
from tests.helpers.exported import language
from tests.helpers.golden_models import PAD
from tests.helpers.profiles import examples
from tests.helpers.small_models import EOS

OPTIONS = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}


# ------------------------------------------------------------------------------------------- a token


def drawn(probabilities, count=1, **options):
    with np.errstate(divide="ignore"):
        log_probs = np.log(np.array(probabilities, np.float32) + np.float32(1e-30))
    random = np.random.default_rng(0)
    words = {**OPTIONS, **options}
    return [chosen(log_probs, PAD, words["temperature"], words["top_k"], words["top_p"], random) for _ in range(count)]


def shares(tokens, types):
    return np.bincount(tokens, minlength=types) / len(tokens)


PROBABILITIES = np.array([0.1, 0.3, 0.05, 0.35, 0.2])  # 0.3 of the pad
WITHOUT_PAD = np.array([0.1, 0.0, 0.05, 0.35, 0.2]) / 0.7


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, WITHOUT_PAD),
        ({"temperature": 0.5}, WITHOUT_PAD**2 / (WITHOUT_PAD**2).sum()),
        ({"temperature": 0.0}, [0, 0, 0, 1, 0]),
        ({"temperature": 0.01}, [0, 0, 0, 1, 0]),
        ({"temperature": 1e-320}, [0, 0, 0, 1, 0]),
        ({"top_k": 2}, [0, 0, 0, 0.35 / 0.55, 0.2 / 0.55]),
        ({"top_k": 1}, [0, 0, 0, 1, 0]),
        ({"top_k": 99}, WITHOUT_PAD),
        ({"top_p": 0.49}, [0, 0, 0, 1, 0]),
        ({"top_p": 0.51}, [0, 0, 0, 0.35 / 0.55, 0.2 / 0.55]),
        ({"top_p": 1e-9}, [0, 0, 0, 1, 0]),
        ({"top_k": 3, "top_p": 0.8}, [0, 0, 0, 0.35 / 0.55, 0.2 / 0.55]),
    ],
)
@pytest.mark.filterwarnings("error")
def test_tokens_are_drawn_with_their_probabilities_of_those_that_are_left(options, expected):
    found = shares(drawn(PROBABILITIES, 4000, **options), 5)
    assert np.array_equal(found > 0, np.array(expected) > 0)
    np.testing.assert_allclose(found, expected, atol=0.03)


def test_numbers_that_are_not_finite_are_refused():
    with pytest.raises(FloatingPointError, match="not numbers"):
        chosen(np.array([0.0, np.nan], np.float32), PAD, 1.0, 0, 1.0, np.random.default_rng(0))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", value) for value in (-1.0, math.nan, math.inf, "1", None)),
        *(("top_p", value) for value in (0.0, 1.1, math.nan, "1")),
        *(("top_k", value) for value in (-1, 2.5)),
        *(("max_tokens", value) for value in (-1, 1.5)),
        ("seed", -1),
    ],
)
def test_options_out_of_range_are_refused(name, value):
    with pytest.raises(ValueError, match=f"{name} is {value!r}; give"):
        language()[1].continue_text("w1", **{name: value})


@pytest.mark.parametrize("options", [{"temperature": Fraction(4, 5)}, {"temperature": 10**309}, {"seed": 2**63}])
def test_options_may_be_any_numbers(options):
    options = {**options, "max_tokens": np.int8(5)}
    assert language()[1].continue_text("w1 " * 200, **options).startswith("w1 " * 200)


@pytest.mark.parametrize(
    ("stop", "kind", "words"),
    [
        ([".", ""], ValueError, "stop string is empty"),
        (".", TypeError, "stop is a single text; give a list"),
        ([1], TypeError, "a stop string is of type int; give str"),
    ],
)
def test_what_are_no_stop_strings_is_refused(stop, kind, words):
    with pytest.raises(kind, match=words):
        language()[1].continue_text("w1", stop=stop)


def test_stop_strings_may_be_any_iterable():
    model, options = language()[1], {"max_tokens": 60, "seed": 3}
    ended = model.continue_text("w1", stop=["w2", "w3"], **options)
    assert (
        ended == model.continue_text("w1", stop=iter(["w2", "w3"]), **options) != model.continue_text("w1", **options)
    )


# ------------------------------------------------------------------------------------------- a text


def test_a_seed_gives_the_same_text_again_and_another_one_does_not():
    ours = language()[1]
    texts = {seed: ours.continue_text("w1 w2", 20, seed=seed) for seed in (1, 2, 3)}
    assert len(set(texts.values())) == 3
    for seed, text in texts.items():
        assert text.startswith("w1 w2 ")
        assert ours.continue_text("w1 w2", 20, seed=seed) == text


def test_texts_that_are_continued_in_turns_do_not_influence_each_other():
    ours = language()[1]
    streams = [ours.stream(text, 20, seed=seed) for text, seed in (("w1 w2", 1), ("w5", 2))]
    found = ["", ""]
    for parts in zip_longest(*streams, fillvalue=""):
        found = [text + part for text, part in zip(found, parts)]
        ours.score_in_steps([5, 6])
    assert found == ["".join(ours.stream("w1 w2", 20, seed=1)), "".join(ours.stream("w5", 20, seed=2))]
    assert all(found)


def test_texts_in_threads_do_not_disturb_each_other():
    ours = language()[1]
    rows = [np.random.default_rng(seed).integers(4, 40, 40).tolist() for seed in range(8)]
    expected = [(ours.score_in_steps(row).tolist(), list(ours.sample(row, 9, 1.0, 0, 1.0, 1))) for row in rows]
    with ThreadPoolExecutor(4) as threads:
        steps = threads.map(lambda row: ours.score_in_steps(row).tolist(), rows)
        drawn_ones = threads.map(lambda row: list(ours.sample(row, 9, 1.0, 0, 1.0, 1)), rows)
        assert list(zip(steps, drawn_ones)) == expected


@pytest.mark.parametrize("prefix", [[], [7, 8, 9, 10], list(range(4, 37))])
def test_the_likeliest_tokens_are_those_of_the_log_probabilities(prefix):
    ours = language()[1]
    found = list(ours.sample(prefix, 12, 0.0, 0, 1.0, 1))
    text = [*prefix, *found]
    for place in range(len(prefix), len(text)):
        ours.decoder.start(1, 1, 1, all_types=True)
        for token in [EOS, *text[:place]]:
            ours.decoder.step(np.array([[token]]), np.zeros((1, 1), int))
        log_probs = ours.decoder.log_probs[0].copy()
        log_probs[PAD] = -np.inf
        assert text[place] == log_probs.argmax()


def test_a_text_ends_where_one_of_the_training_would(monkeypatch):
    ours = language()[1]
    monkeypatch.setattr(ours, "sample", lambda *call: iter([5, 6, EOS]))
    assert ours.continue_text("w3") == "w3 w1 w2"
    assert ours.continue_text("") == "w1 w2"


def test_no_tokens_are_added_if_none_are_asked_for():
    assert language()[1].continue_text("w1 w2", 0) == "w1 w2"


# ------------------------------------------------------------------------------------------- parts


def streamed(model, monkeypatch, given_text, written, stop=()):
    """The parts in which this text, as bytes, is given out."""
    tokens = model.types.encode(map(str, written))
    with monkeypatch.context() as patch:
        patch.setattr(model, "sample", lambda *call: iter(tokens))
        return list(model.stream(given_text, stop=stop))


TEXTS = st.text(st.sampled_from("ab\n\u00e4\u20ac\U0001f600\u0301"), max_size=9)
STOPS = st.lists(st.text(st.sampled_from("ab\u20ac"), min_size=1, max_size=3), max_size=2)


def until_stop(text, stop):
    for length in range(len(text) + 1):
        found = [text[:length].find(each) for each in stop if each in text[:length]]
        if found:
            return text[: min(found)]
    return text


@given(before=TEXTS, text=TEXTS, stop=STOPS)
@examples(60)
def test_parts_of_bytes_are_whole_characters_that_together_are_the_text(of_bytes, before, text, stop):
    with pytest.MonkeyPatch.context() as monkeypatch:
        parts = streamed(of_bytes, monkeypatch, before, text.encode(), stop)
    assert not any("\ufffd" in part for part in parts)
    assert "".join(parts) == until_stop(text, stop)


@given(written=st.lists(st.sampled_from(b"a\xe2\x82\xac\xf0\x9f\x98\x80\xed\xa0\xff"), max_size=30).map(bytes))
@examples(60)
def test_parts_of_any_bytes_come_at_once_but_for_the_last_character(of_bytes, written):
    with pytest.MonkeyPatch.context() as monkeypatch:
        parts = streamed(of_bytes, monkeypatch, "\u20ac", written)
    assert "".join(parts) == written.decode(errors="replace")
    for count in range(1, len(written) + 1):
        text = written[:count].decode(errors="replace")
        assert "".join(parts[:count]) == (text[:-1] if text.endswith("\ufffd") else text)


def test_bytes_that_are_no_character_are_marked(of_bytes, monkeypatch):
    for written in (b"a\xe2\x82", b"\xff\xfe", b"a\x82b", "\u20ac".encode()[:2] + b"a"):
        parts = streamed(of_bytes, monkeypatch, "\u20ac", written)
        assert "".join(parts) == written.decode(errors="replace")
    assert of_bytes.segmented.join(["97", "<unk>", "256", "\u00b2"]) == "a\ufffd\ufffd\ufffd"


def test_a_text_that_may_be_the_beginning_of_a_stop_is_held_back(of_bytes, monkeypatch):
    assert streamed(of_bytes, monkeypatch, "", b"ababc", stop=["abc"]) == ["", "", "a", "b", ""]
    assert "".join(streamed(of_bytes, monkeypatch, "", b"abab", stop=["abc"])) == "abab"
    for stop in (["\ufffd"], ["b\ufffd", "\ufffd"]):
        assert "".join(streamed(of_bytes, monkeypatch, "", b"ab\xe2", stop=stop)) == "ab"[: 3 - len(stop[0])]


def test_a_drawn_text_of_bytes_is_the_same_in_parts(of_bytes):
    whole = of_bytes.continue_text("\u20ac", 60, seed=3)
    assert whole == "\u20ac" + "".join(of_bytes.stream("\u20ac", 60, seed=3))
    assert len(whole) > 20
    assert of_bytes.config["text"]["kind"] == "bytes"


def test_parts_of_words_are_given_out_as_they_are_found(monkeypatch):
    ours = language()[1]
    monkeypatch.setattr(ours, "sample", lambda *call: iter([5, 6, 3, 7]))
    assert list(ours.stream("w1 w2")) == [" w1", " w2", " <unk>", " w3", ""]
    assert list(ours.stream("")) == ["w1", " w2", " <unk>", " w3", ""]


def test_a_blank_at_the_end_of_a_text_is_not_written_twice(pieces_model, monkeypatch):
    types = [f"\u2581{word}" for word in ("der", "Haus", "ist")]
    ours = language()[1]
    for segmented, tokens in ((Words(), ("w1", "w2")), (Pieces(pieces_model), types)):
        with monkeypatch.context() as patch:
            patch.setattr(ours, "segmented", segmented)
            patch.setattr(ours, "types", Types(["<s>", "<pad>", "</s>", "<unk>", *tokens], 3, 1))
            patch.setattr(ours, "sample", lambda *call: iter([4, 5]))
            first, second = (token.strip("\u2581") for token in tokens[:2])
            for text in (first, f"{first} ", f"{first}\n", f"{first} \u00e4"):
                joined = " " * (not text[-1].isspace())
                assert ours.continue_text(text) == f"{text}{joined}{first} {second}"


@pytest.mark.parametrize("length", [1, 7, 8, 9, 200])
def test_parts_do_not_depend_on_the_length_of_the_text_before(of_bytes, monkeypatch, length):
    before = ("\u20ac\U0001f600" * length)[:length]
    assert "".join(streamed(of_bytes, monkeypatch, before, "a\u20acb".encode())) == "a\u20acb"
