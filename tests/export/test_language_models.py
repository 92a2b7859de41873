"""Exported language models give the log-probabilities of the model, for any split of a text, and continue it."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mega_runtime import language_model as module
from mega_runtime.language_model import Reader
from tests.helpers.exported import language
from tests.helpers.profiles import examples
from tests.helpers.small_models import CHUNK, EOS, TYPES

MODELS = {
    "chunks": {},
    "sixteen states": {"decoder_n_dim": 16, "share_decoder_input_output_embed": True, "output_bias": True},
    "whole": {"decoder_chunk_size": -1},
    "whole, simple": {"decoder_chunk_size": -1, "rel_pos_bias": "simple", "max_target_positions": 100},
    "whole, laplace": {"decoder_chunk_size": -1, "attention_activation_fn": "laplace", "rel_pos_bias": "rope"},
    "rope": {"rel_pos_bias": "rope", "decoder_chunk_size": 8, "share_decoder_input_output_embed": True},
    "laplace": {
        "attention_activation_fn": "laplace", "rel_pos_bias": "t5", "share_decoder_input_output_embed": True,
        "output_dense": True,
    },
    "relu2": {"attention_activation_fn": "relu2", "rel_pos_bias": "alibi", "decoder_chunk_size": 1},
    "narrow, dense": {"decoder_input_dim": 6, "output_dense": True, "normalize_embedding": True},
    "narrow, not scaled": {"decoder_input_dim": 6, "no_scale_embedding": True, "rel_pos_bias": "none"},
    "postnorm": {"normalize_before": False, "ffn_activation_fn": "geglu", "normalization_type": "rmsnorm"},
}  # fmt: skip
each = pytest.mark.parametrize("name", MODELS)
LENGTHS = [1, CHUNK - 1, CHUNK, CHUNK + 1, 31, 32, 33, 67]
TOLERANCE = {"atol": 2e-5, "rtol": 0}


def text_of(length, seed=0):
    return np.random.default_rng(seed).integers(4, TYPES, length).tolist()


def expected_of(model, text):
    """The log-probability of each token."""
    with torch.no_grad():
        return model(torch.tensor([[EOS, *text[:-1]]]), target=torch.tensor([text]))[0][0, :, 0].numpy()


@each
def test_texts_of_any_length(name):
    model, ours = language(**MODELS[name])
    for length in LENGTHS:
        text = text_of(length)
        expected = expected_of(model, text)
        np.testing.assert_allclose(ours.score_tokens(text), expected, **TOLERANCE)
        np.testing.assert_allclose(ours.score_in_steps(text), expected, **TOLERANCE)


def check_split(name, length, cuts, steps, seed=0):
    """Pieces, then single tokens: the log-probabilities are those of the whole text."""
    model, ours = language(**MODELS[name])
    text, found = text_of(length, seed), []
    before, state = [EOS, *text[:-1]], ours.reader.start()
    read = max(0, length - steps)
    borders = sorted({0, read, *(cut % (read + 1) for cut in cuts)})
    for start, stop in zip(borders, borders[1:]):
        state, log_probs = ours.reader.read(state, before[start:stop], text[start:stop])
        found += log_probs.tolist()
    beams = 3
    ours.decoder.start(1, beams, 1, all_types=True)
    ours.decoder.go_on(state)
    for token, target in zip(before[read:], text[read:]):
        ours.decoder.step(np.array([[5, token, 7]]), np.array([[0, 1, 1]]) if len(found) % 2 else np.array([[1, 1, 0]]))
        found.append(ours.decoder.log_probs[1, target])
    np.testing.assert_allclose(found, expected_of(model, text), **TOLERANCE)


@each
def test_any_pieces_and_then_tokens_in_beams(name):
    cuts = st.lists(st.integers(0, 99), max_size=4)

    @given(st.sampled_from(LENGTHS), cuts, st.sampled_from([0, 1, 4, 11, 30]), st.integers(0, 9))
    @examples(12)
    def check(length, cuts, steps, seed):
        check_split(name, length, cuts, steps, seed)

    check()


@pytest.mark.parametrize("cut", [1, 31, 32, 33, 64])
def test_pieces_that_end_at_the_edges_of_blocks(cut):
    """The EMA's blocks have 32 tokens."""
    check_split("sixteen states", 67, [cut], 0)


@pytest.mark.parametrize("forgotten", ["ema", "keys"])
@pytest.mark.parametrize("steps", [0, 20])
def test_a_state_that_is_not_carried_is_detected(monkeypatch, forgotten, steps):
    read = Reader.read

    def forgetful(self, state, *call):
        after, log_probs = read(self, state, *call)
        if forgotten == "ema":
            return after._replace(ema=[array * 0 for array in after.ema]), log_probs
        return after._replace(values=[array * 0 for array in after.values]), log_probs

    check_split("whole", 67, [20], steps)
    monkeypatch.setattr(Reader, "read", forgetful)
    with pytest.raises(AssertionError):
        check_split("whole", 67, [20], steps)


def test_long_texts_are_read_in_pieces(monkeypatch):
    model, ours = language(**MODELS["chunks"])
    text = text_of(67)
    expected = ours.score_tokens(text)
    for size in (1, 7, 66):
        monkeypatch.setattr(module, "PIECE", size)
        np.testing.assert_allclose(ours.score_tokens(text), expected, **TOLERANCE)
        state, some = ours.reader.read(ours.reader.start(), [EOS, *text[:-1]], text[-9:])
        assert state.position == 67
        np.testing.assert_allclose(some, expected[-9:], **TOLERANCE)


def test_a_graph_is_always_asked_for_a_log_probability(monkeypatch):
    """Old versions of ONNX Runtime fail at products of no rows in 8 bits."""
    ours, asked = language("int8", **MODELS["chunks"])[1], []
    run = ours.reader.session.run

    class Session:
        def run(self, names, inputs):
            asked.append(len(inputs["wanted"]))
            return run(names, inputs)

    monkeypatch.setattr(module, "PIECE", 7)
    monkeypatch.setattr(ours.reader, "session", Session())
    expected = ours.score_tokens(text_of(30))
    for count in (0, 1, 9, 30):
        found = ours.reader.read(ours.reader.start(), [EOS, *text_of(30)[:-1]], text_of(30)[30 - count :])[1]
        np.testing.assert_allclose(found, expected[30 - count :], **TOLERANCE)
    assert 0 not in asked


def test_in_8_bits_log_probabilities_are_near():
    for name in ("chunks", "whole", "narrow, dense"):
        model, ours = language("int8", **MODELS[name])
        gap = ours.score_tokens(text_of(67)) - expected_of(model, text_of(67))
        assert 1e-5 < np.sqrt(np.mean(gap**2)) < 0.05


def test_scores_of_texts_in_words():
    model, ours = language(**MODELS["chunks"])
    score = ours.score("w1 w2  unknown w3")
    assert score.pieces == ["w1", "w2", "<unk>", "w3"]
    np.testing.assert_allclose(score.log_probs, expected_of(model, [5, 6, 3, 7]), **TOLERANCE)
    assert score.bits == pytest.approx(-score.log_probs.mean() / np.log(2))
    for blank in ("", " \t"):
        assert (ours.score(blank).pieces, ours.score(blank).bits, len(ours.score(blank).log_probs)) == ([], 0.0, 0)


def test_a_model_without_chunks_reads_as_many_tokens_as_in_the_training():
    model, ours = language(**MODELS["whole, simple"])
    text = text_of(100)
    np.testing.assert_allclose(ours.score_tokens(text), expected_of(model, text), **TOLERANCE)
    np.testing.assert_allclose(ours.score_in_steps(text), expected_of(model, text), **TOLERANCE)
    assert len(list(ours.sample(text[:30], 70, 1.0, 0, 1.0, 1))) <= 70
    for call, remedy in (
        (lambda: ours.score_tokens(text_of(101)), "shorten it$"),
        (lambda: list(ours.sample(text[:31], 70, 1.0, 0, 1.0, 1)), "shorten it, or lower max_tokens"),
    ):
        with pytest.raises(ValueError, match=f"101 tokens and the model reads 100; {remedy}"):
            call()
