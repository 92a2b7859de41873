"""Attention in a graph is that of the modules, for each function and position bias, in chunks and whole."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mega_fairseq.export.attention import attend_both_directions, attend_past, count, queries_and_keys
from mega_fairseq.export.cross_attention import Limits, Source, cross_attend, source_keys_values
from mega_fairseq.export.layers import project
from mega_fairseq.modules import POSITION_BIASES, GatedAttentionConfig, GatedCrossAttention, GatedCrossAttentionConfig
from mega_fairseq.modules.mixer import Batch
from mega_fairseq.ops.attention import ATTENTION_FUNCTIONS
from mega_fairseq.ops.attention.scores import MASKED
from mega_fairseq.ops.padding import Alignment
from tests.helpers.exported import assert_near, random, randomised, run
from tests.helpers.profiles import examples

CHUNK, LONGEST = 8, 40
SIZES = {"shared_dim": 6, "value_dim": 5, "ndim": 1, "max_positions": LONGEST}
LENGTHS = [1, CHUNK - 1, CHUNK, CHUNK + 1, 31, 37]
each_function = pytest.mark.parametrize("function", ATTENTION_FUNCTIONS)
each_bias = pytest.mark.parametrize("bias", POSITION_BIASES)
in_chunks = pytest.mark.parametrize("chunk", [CHUNK, None, 1])


def mixer_of(function, bias, chunk, causal):
    config = GatedAttentionConfig(4, attention=function, position_bias=bias, chunk_size=chunk, causal=causal, **SIZES)
    mixer = randomised(config.build())
    with torch.no_grad():  # so that keys differ
        mixer.kappa.mul_(4.0)
        mixer.mu.mul_(4.0)
    return mixer


def attended(mixer, x, v, lengths=None):
    """What the mixer attends to, from X' (B, L, D) and values (B, L, e)."""
    with torch.no_grad():
        x, v = torch.from_numpy(x), torch.from_numpy(v)
        align = None if lengths is None else Alignment(torch.tensor(lengths), x.size(1))
        padding = None if lengths is None else torch.arange(x.size(1)) >= torch.tensor(lengths)[:, None]
        q, k = mixer.queries_keys(x)
        return mixer.in_chunks(mixer.attend, q, k, v, None, Batch(x, None, align, padding))[0]


def real_of(lengths):
    return (np.arange(max(lengths)) < np.array(lengths)[:, None]).astype(np.float32)


def from_input(g, x, mixer):
    return queries_and_keys(g, project(g, x, mixer.shared), mixer)


# ------------------------------------------------------------------------------------------- both directions


def check_both(function, bias, chunk, length, real=real_of):
    mixer, lengths = mixer_of(function, bias, chunk, False), [length, max(1, length - CHUNK - 2), 1]
    x, v = random(3, length, 4), random(3, length, 5, seed=1)

    def build(g, x, v, mask):
        return attend_both_directions(g, *from_input(g, x, mixer), v, mixer, mask, LONGEST)

    (y,) = run(build, x, v, real(lengths))
    expected = attended(mixer, x, v, lengths)
    for row, n in enumerate(lengths):
        assert_near(y[row, :n], expected[row, :n])


@each_bias
@each_function
@in_chunks
def test_both_directions_of_padded_rows(function, bias, chunk):
    for length in LENGTHS:
        check_both(function, bias, chunk, length)


@each_function
@pytest.mark.parametrize("chunk", [CHUNK, None])
def test_pads_that_are_seen_are_detected(function, chunk):
    with pytest.raises(AssertionError):
        check_both(function, "rotary", chunk, 31, lambda lengths: np.ones_like(real_of(lengths)))


# ------------------------------------------------------------------------------------------- pieces of a text


def check_pieces(function, bias, chunk, length, cuts, carry=lambda before, after: after):
    mixer = mixer_of(function, bias, chunk, True)
    x, v, found = random(1, length, 4), random(1, length, 5, seed=1), []
    caches = [np.zeros((1, 0, width), np.float32) for width in (6, 5)]

    def build(g, x, v, *caches):
        return attend_past(g, *from_input(g, x, mixer), v, *caches, mixer, LONGEST)

    for start, stop in zip([0, *cuts], [*cuts, length]):
        y, *after = run(build, x[:, start:stop], v[:, start:stop], *caches)
        assert after[0].shape[1] == after[1].shape[1] == (stop if chunk is None else stop % chunk)
        caches, found = carry(caches, after), [*found, y]
    assert_near(np.concatenate(found, 1), attended(mixer, x, v))


@each_bias
@each_function
@in_chunks
def test_a_text_and_two_pieces_of_it(function, bias, chunk):
    for length, cut in ((1, []), (CHUNK, [CHUNK - 1]), (31, []), (37, [CHUNK]), (37, [CHUNK + 1])):
        check_pieces(function, bias, chunk, length, cut)


@given(st.sampled_from(LENGTHS[1:]), st.sampled_from([CHUNK, None]), st.data())
@examples(20)
def test_any_pieces(length, chunk, data):
    cuts = data.draw(st.lists(st.integers(1, length - 1), max_size=5, unique=True).map(sorted))
    check_pieces(data.draw(st.sampled_from(ATTENTION_FUNCTIONS)), "simple", chunk, length, cuts)


def test_keys_that_are_not_carried_are_detected():
    def forgetful(before, after):
        return [t[:, :0] for t in before]

    for chunk in (CHUNK, None):
        with pytest.raises(AssertionError):
            check_pieces("softmax", "simple", chunk, 31, [11], forgetful)


# ------------------------------------------------------------------------------------------- attention to a source


def check_cross(function, bias, prenorm=True, activation="silu", position=3, kind="layernorm", mask=MASKED):
    """Two sentences with three beams each."""
    config = GatedCrossAttentionConfig(
        4, shared_dim=6, source_dim=7, attention=function, position_bias=bias, max_positions=LONGEST, prenorm=prenorm,
        activation=activation, norm=kind,
    )  # fmt: skip
    module, limits, lengths = randomised(GatedCrossAttention(config)), Limits(30, LONGEST), [11, 5]
    source, x = random(2, 11, 7), random(6, 4, seed=1)
    real = real_of(lengths)

    def build(g, source, x, hidden, position):
        keys, values = source_keys_values(g, source, module, count(g, source.sizes(1, 2)), limits)
        return cross_attend(g, x, keys, values, module, Source(hidden, position, None), limits)

    hidden = np.where(real > 0, 0.0, mask).astype(np.float32)[:, None]
    y, looks = run(build, source, x, hidden, np.array([position]))
    with torch.no_grad():
        state = module.project_source(torch.from_numpy(source), torch.from_numpy(real) == 0)
        state = state._replace(position=position)
        expected, _, weights = module(torch.from_numpy(x)[:, None], state=state, need_weights=True)
    assert_near(y, expected[:, 0])
    assert_near(looks.reshape(6, -1), weights[:, 0])


@each_bias
@each_function
def test_beams_attend_to_their_padded_sources(function, bias):
    for position in (0, 3, LONGEST - 1):
        check_cross(function, bias, position=position)


@pytest.mark.parametrize("prenorm", [True, False])
@pytest.mark.parametrize("activation", ["silu", "relu", "gelu"])
def test_cross_attention_with_each_order_of_norms_and_activation(prenorm, activation):
    check_cross("softmax", "simple", prenorm, activation)


def test_pads_of_a_source_that_are_seen_are_detected():
    with pytest.raises(AssertionError):
        check_cross("softmax", "simple", mask=0.0)
