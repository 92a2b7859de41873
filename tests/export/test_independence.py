"""A sentence has the same translation alone and among others; in one step, a row has the same bits."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mega_fairseq.export import stacks
from mega_fairseq.export.graph import LARGEST, MICROSOFT, Graph
from mega_runtime.decoder import MASKED, Decoder
from mega_runtime.translator import Translator
from tests.helpers.exported import CHUNK, CHUNKS, SEARCHED, documents, ours, sources, translation
from tests.helpers.hypotheses import assert_same
from tests.helpers.profiles import examples

each = pytest.mark.parametrize("name", ["whole", "laplace", "chunks", "no ends"])
LENGTHS = st.lists(st.integers(1, 3 * CHUNK), min_size=2, max_size=11)
LIMITS = st.sampled_from([{}, {}, {"max_len_a": 0.2, "max_len_b": 0, "min_len": 0}])
CUTS = st.lists(st.integers(0, 9), max_size=3)
OPTIONS = {"beam": 4, "max_len_a": 0.5, "max_len_b": 10}


def parts_of(rows, cuts):
    """Consecutive parts of a batch."""
    borders = sorted({0, len(rows), *(cut % len(rows) for cut in cuts)})
    return [rows[start:stop] for start, stop in zip(borders, borders[1:])]


# ------------------------------------------------------------------------------------------- whole searches


def check_split(translator, rows, cuts, **options):
    options = {**OPTIONS, **options}
    together = ours(translator, rows, **options)
    apart = [hypotheses for part in parts_of(rows, cuts) for hypotheses in ours(translator, part, **options)]
    alone = [ours(translator, [row], **options)[0] for row in rows]
    for found in (apart, alone):
        assert_same(found, together, tolerance=1e-5, tie=1e-6)


@each
def test_sentences_have_the_same_hypotheses_in_any_split_of_a_batch(name, full):
    @given(lengths=LENGTHS, cuts=CUTS, beam=st.integers(1, 6), limits=LIMITS, seed=st.integers(0, 99))
    @examples(12)
    def check(lengths, cuts, beam, limits, seed):
        check_split(translation(**SEARCHED[name])[1], sources(*lengths, seed=seed), cuts, beam=beam, **limits)

    check()


def test_searches_do_not_depend_on_those_before_them():
    translator, rows = translation(**SEARCHED["whole"])[1], sources(9, 3, 30)
    expected = ours(translator, rows, **OPTIONS)
    ours(translator, sources(40, 40, 40, 40), beam=6, max_len_b=60)
    ours(translator, sources(2), beam=1, max_len_b=3)
    assert ours(translator, rows, **OPTIONS) == expected


def test_in_8_bits_the_best_hypotheses_are_the_same_alone_and_in_a_batch(full):
    same, rows = [], sources(*np.random.default_rng(0).integers(1, 25, 60))
    for name in ("whole", "laplace", "chunks"):
        translator = translation("int8", **SEARCHED[name])[1]
        together = [each for part in parts_of(rows, range(0, 60, 12)) for each in ours(translator, part, **OPTIONS)]
        for row, ((tokens, score), *_) in zip(rows, together):
            (found, alone), *_ = ours(translator, [row], **OPTIONS)[0]
            same.append(found == tokens)
            assert not same[-1] or abs(alone - score) < 1e-3
    assert np.mean(same) >= 0.99


# ------------------------------------------------------------------------------------------- one step


def random_inputs(session, sentences, beams, places, length):
    """Inputs of a step, with large numbers in some sentences and small ones in others."""
    draw, inputs = np.random.default_rng(0), {}
    sizes = {"S": sentences, "R": sentences * beams, "b": beams, "n": places, "m": length}
    scales = 10.0 ** draw.integers(-2, 3, (sentences, 1))
    for x in session.get_inputs():
        shape = [sizes.get(dim, dim) for dim in x.shape]
        if x.type == "tensor(float)":
            numbers = draw.standard_normal(shape).reshape(sentences, -1) * scales
            inputs[x.name] = numbers.astype(np.float32).reshape(shape)
        else:
            inputs[x.name] = draw.integers(4, CHUNK, shape)
    inputs["order"] = (draw.integers(0, beams, (sentences, beams)) + beams * np.arange(sentences)[:, None]).ravel()
    for name in ("mask", "source_mask"):
        inputs[name] = np.where(draw.integers(0, 2, inputs[name].shape), np.float32(0.0), MASKED)
    return inputs


def of_sentence(session, inputs, number, beams):
    alone = dict(inputs)
    for x in session.get_inputs():
        if x.shape[0] in ("S", "R"):
            count = 1 if x.shape[0] == "S" else beams
            alone[x.name] = inputs[x.name][number * count :][:count]
    return {**alone, "order": alone["order"] - number * beams}


def check_bits(translator, sentences, beams, places, length):
    session = translator.steps
    inputs = random_inputs(session, sentences, beams, places, length)
    together = session.run(None, inputs)
    for number in range(sentences):
        alone = session.run(None, of_sentence(session, inputs, number, beams))
        for y, one, other in zip(session.get_outputs(), alone, together):
            count = 1 if y.shape[0] == "S" else beams
            assert one.tobytes() == other[number * count :][:count].tobytes(), y.name


@pytest.mark.parametrize("number_format", ["float32", "int8"])
@pytest.mark.parametrize("name", ["whole", "laplace", "chunks"])
def test_rows_of_one_step_have_the_same_bits_alone_and_among_others(name, number_format):
    """A sentence with a beam of one has not: the product of a single row is another kernel."""
    translator = translation(number_format, **SEARCHED[name])[1]
    for sentences, beams in ((2, 5), (16, 5), (3, 2), (8, 4)):
        for places, length in ((beams, 11), (10, 9), (40, 30), (12, 1)):
            check_bits(translator, sentences, beams, places, length)


# ------------------------------------------------------------------------------------------- broken twins


def one_scale_for_all_rows(monkeypatch):
    """The activations of a batch are rounded with the same scale, as `DynamicQuantizeLinear` does."""

    def rounded_product(self, x, weight, scale, bias):
        largest = self.op("ReduceMax", self.op("Abs", x), keepdims=0)
        unit, zero = np.float32(1 / LARGEST), np.uint8(128)
        whole = self.op("QuantizeLinear", x / largest, unit, zero)
        y = self.op("MatMulIntegerToFloat", whole, weight, unit, scale, zero, domain=MICROSOFT) * largest
        return y if bias is None else y + bias

    monkeypatch.setattr(Graph, "rounded_product", rounded_product)


def pads_in_self_attention(monkeypatch):
    attend = stacks.attend_both_directions

    def twin(g, q, k, v, mixer, real, longest):
        return attend(g, q, k, v, mixer, real * 0.0 + 1.0, longest)

    monkeypatch.setattr(stacks, "attend_both_directions", twin)


def pads_in_the_ema(monkeypatch):
    ema = stacks.ema_both_directions
    monkeypatch.setattr(stacks, "ema_both_directions", lambda g, x, *rest: ema(g, x + 0.1, *rest))


def pads_in_cross_attention(monkeypatch):
    attend = stacks.cross_attend

    def twin(*call):
        *first, source, limits = call
        return attend(*first, source._replace(mask=source.mask * 0.0), limits)

    monkeypatch.setattr(stacks, "cross_attend", twin)


def test_one_scale_for_all_rows_is_detected(monkeypatch):
    check_bits(translation("int8", **SEARCHED["whole"])[1], 3, 5, 10, 9)
    one_scale_for_all_rows(monkeypatch)
    with pytest.raises(AssertionError):
        check_bits(translation.__wrapped__("int8", **SEARCHED["whole"])[1], 3, 5, 10, 9)


@pytest.mark.parametrize("twin", [pads_in_self_attention, pads_in_the_ema, pads_in_cross_attention])
def test_pads_that_are_read_are_detected(monkeypatch, twin):
    rows = sources(3, 20, 9, 14)
    check_split(translation(**SEARCHED["whole"])[1], rows, [2])
    twin(monkeypatch)
    with pytest.raises(AssertionError):
        check_split(translation.__wrapped__(**SEARCHED["whole"])[1], rows, [2])


def assert_equal(found, expected):
    assert found == expected


def in_threads(translator):
    rows = [sources(*[CHUNK + n] * 3, seed=n) for n in range(8)]
    expected = [ours(translator, each, **OPTIONS) for each in rows]
    with ThreadPoolExecutor(3) as threads:
        return list(threads.map(lambda each: ours(translator, each, **OPTIONS), rows)), expected


def between_lines(translator):
    texts = [[" ".join(f"w{n + k}" for k in range(3)) for n in range(start, start + 9)] for start in (1, 12)]
    streams = [translator.stream_documents([text]) for text in texts]
    return list(zip(*streams)), list(zip(*[list(translator.stream_documents([text])) for text in texts]))


def test_searches_in_threads_do_not_disturb_each_other():
    assert_equal(*in_threads(translation(**SEARCHED["chunks"])[1]))


@pytest.fixture
def of_documents(monkeypatch):
    translator = documents(cross_attention_positions="sentence", ends=2.0, **CHUNKS)[2]
    monkeypatch.setitem(translator.config["documents"], "window_tokens", 1000)
    return translator


def test_searches_between_lines_of_others_do_not_disturb_each_other(of_documents):
    found, expected = between_lines(of_documents)
    assert found == expected
    assert len(found) == 9


def test_a_decoder_in_two_searches_is_detected(monkeypatch, of_documents):
    """In turns, not in threads, whose order is another in each run."""
    shared = Decoder(of_documents.steps, of_documents.config["decoder_chunk"])
    monkeypatch.setattr(Translator, "_decoder", lambda self: nullcontext(shared))
    with pytest.raises((AssertionError, ValueError)):
        assert_equal(*between_lines(of_documents))
