"""A step continues any rows of its sentence: the tree of tokens holds what each of them has read, and nothing else."""

import functools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mega_fairseq.export import stacks
from mega_fairseq.export.folder import write_translation
from mega_runtime import Translator, decoder
from mega_runtime.decoder import Decoder
from tests.helpers.exported import CHUNKS, LINES, new_folder, sources
from tests.helpers.profiles import examples
from tests.helpers.small_models import EOS, SEPARATORS, net_input, translation_model

OPTIONS = {
    "whole": {"decoder_n_dim": 16},
    "chunks": CHUNKS,
    "chunks of one token": {"decoder_chunk_size": 1},
    "rope": {"rel_pos_bias": "rope", "decoder_chunk_size": 5},
    "laplace": {"attention_activation_fn": "laplace"},
    "lines": {**CHUNKS, **LINES},
    "lines, whole": {"cross_attention_positions": "sentence", "attention_activation_fn": "relu2"},
    "window": {"cross_attention_window": 0},
}


def exported(name):
    model, folder = translation_model(**OPTIONS[name]), new_folder()
    settings = {"source_separator": SEPARATORS[0], "line_length_a": 2.0, "line_length_b": 20.0, "window_tokens": 60}
    lines = {"separators": SEPARATORS, "documents": settings}
    write_translation(folder, model, **(lines if model.decoder.separators else {}))
    return model, Translator(folder)


cached = functools.lru_cache(maxsize=None)(exported)


def steps_of(translator, rows, beams, steps, seed):
    """Random tokens after random rows, while sentences leave: sentences, texts (S, b) and their log-probabilities."""
    inputs, places = translator._sources(rows, beams)
    state = Decoder(translator.steps, translator.config["decoder_chunk"])
    draw, sentences = np.random.default_rng(seed), np.arange(len(rows))
    state.start(len(rows), beams, 3, inputs, all_types=True)
    tokens, parents = np.full((len(rows), beams), EOS), np.tile(np.arange(beams), (len(rows), 1))
    texts = [[[]] * beams for _ in rows]
    found = [[[]] * beams for _ in rows]
    for _ in range(steps):
        if places is not None:
            places.advance(tokens, parents, state.sources["source_places"])
        state.step(tokens, parents)
        log_probs = state.log_probs.reshape(*tokens.shape, -1)
        for s, (token, parent) in enumerate(zip(tokens, parents)):
            texts[s] = [[*texts[s][p], t] for t, p in zip(token.tolist(), parent)]
            found[s] = [[*found[s][p], log_probs[s, beam].copy()] for beam, p in enumerate(parent)]
        staying = np.flatnonzero(draw.integers(0, 12, len(texts)))
        if 0 < len(staying) < len(texts):
            for each in (state, *([] if places is None else [places])):
                each.keep(staying)
            texts, found, sentences = [texts[s] for s in staying], [found[s] for s in staying], sentences[staying]
        tokens = draw.integers(4, 12, (len(texts), beams))  # separators are among them
        parents = draw.integers(0, beams, (len(texts), beams))
    return sentences, texts, found


def check(model, translator, lengths, beams, steps, seed):
    rows = [[SEPARATORS[0] if t % 5 == 0 and n % 3 else t for n, t in enumerate(row)] for row in sources(*lengths)]
    for sentence, texts, found in zip(*steps_of(translator, rows, beams, steps, seed)):
        before = torch.tensor(texts)
        with torch.no_grad():
            scores = model(**net_input([rows[sentence]] * beams), prev_output_tokens=before)
            expected = model.get_normalized_probs(scores, log_probs=True).numpy()
        np.testing.assert_allclose(np.array(found), expected, atol=2e-5, rtol=0)


CASES = given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    beams=st.integers(1, 5),
    steps=st.sampled_from([1, 7, 8, 9, 26]),
    seed=st.integers(0, 999),
)


@pytest.mark.parametrize("name", OPTIONS)
def test_rows_have_the_log_probabilities_of_what_they_continue(name, full):
    CASES(examples(12)(lambda **case: check(*cached(name), **case)))()


@pytest.mark.parametrize("name", ["whole", "chunks"])
def test_rows_with_free_storage_for_many_steps(name):
    CASES(examples(6)(lambda **case: check(*cached(name), **case)))()


# ------------------------------------------------------------------------------------------- broken twins

CASE = {"lengths": [9, 4, 6], "beams": 4, "steps": 20, "seed": 3}


def ignoring_the_mask(monkeypatch):
    attend = stacks.attend_tree
    monkeypatch.setattr(
        stacks,
        "attend_tree",
        lambda *call: attend(*call[:-2], call[-2]._replace(mask=call[-2].mask * 0.0), call[-1]),
    )


def ignoring_the_order(monkeypatch):
    token = stacks.ema_token

    def in_place(g, x, state, order, *rest):
        return token(g, x, state, stacks.count(g, order.sizes(0, 1)), *rest)

    monkeypatch.setattr(stacks, "ema_token", in_place)


def keeping_places_after_a_chunk(monkeypatch):
    monkeypatch.setattr(decoder, "MASKED", np.float32(0.0))


def dropping_places_without_their_positions(monkeypatch):
    drop = Decoder._drop_unseen

    def forgetful(self):
        drop(self)
        self.at[...] = 0

    monkeypatch.setattr(Decoder, "_drop_unseen", forgetful)


def leaving_without_the_mask(monkeypatch):
    keep = Decoder.keep

    def forgetful(self, sentences):
        mask = self.mask[: len(sentences)].copy()
        keep(self, sentences)
        self.mask[...] = mask

    monkeypatch.setattr(Decoder, "keep", forgetful)


@pytest.mark.parametrize(
    ("twin", "name"),
    [
        (ignoring_the_mask, "whole"),
        (ignoring_the_mask, "chunks"),
        (ignoring_the_order, "chunks"),
        (keeping_places_after_a_chunk, "chunks"),
        (dropping_places_without_their_positions, "whole"),
        (leaving_without_the_mask, "whole"),
    ],
)
def test_a_step_that_sees_other_tokens_is_detected(monkeypatch, full, twin, name):
    check(*cached(name), **CASE)
    twin(monkeypatch)
    with pytest.raises(AssertionError):
        check(*exported(name), **CASE)
