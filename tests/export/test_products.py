"""Numbers of 8 bits: how they are rounded, that products of them are exact, and that the CPU is asked for it."""

import numpy as np
import onnxruntime
from hypothesis import given
from hypothesis import strategies as st

from mega_fairseq.export.folder import PROBE_WIDTH
from mega_fairseq.export.graph import in_8_bits
from mega_runtime import LanguageModel, Translator
from mega_runtime.folder import PROBE, Folder
from tests.helpers.exported import SEARCHED, language, ours, random, run, sources, translation
from tests.helpers.hypotheses import assert_same
from tests.helpers.profiles import examples

SIZES = st.tuples(st.integers(1, 9), st.integers(1, 70), st.integers(1, 40))


def by_definition(x, weight, bias):
    """Each row of x and of the weight in integers from -127 to 127, with a scale of its own."""
    rows, columns = (np.abs(t.astype(np.float64)).max(1, keepdims=True) for t in (x, weight))
    rows, columns = np.where(rows, rows, 1.0), np.where(columns, columns, 1.0)
    whole = [np.rint(t / largest * 127) for t, largest in ((x, rows), (weight, columns))]
    return whole[0] @ whole[1].T * (rows / 127) * (columns.T / 127) + bias


@given(SIZES, st.sampled_from([1e-4, 1.0, 1e4]), st.integers(0, 99))
@examples(25)
def test_products_are_those_of_rounded_numbers(sizes, scale, seed):
    rows, width, outputs = sizes
    x, weight, bias = random(rows, width, seed=seed), random(outputs, width, seed=seed + 1), random(outputs)
    x, weight = x * scale * 10.0 ** np.arange(-2, rows - 2, dtype=np.float32)[:, None], weight * (np.arange(width) < 60)
    x[0], weight[0] = 0.0, 0.0
    (y,) = run(lambda g, x: g.linear(x, weight, bias), x, number_format="int8")
    expected = by_definition(x, weight, bias)
    assert np.array_equal(y[0], bias)
    gap, size = np.abs(y - expected), np.abs(x).max(1, keepdims=True) * np.abs(weight).max()
    rounding = 1e-5 * size * width + 1e-6 * np.abs(expected)
    assert (gap <= rounding).mean() > 0.9
    assert (gap <= rounding + size / 127).all()  # a number between two integers may become either


def test_products_of_the_largest_numbers_are_exact():
    x, weight = np.ones((3, 512), np.float32), np.ones((4, 512), np.float32)
    for sign in (1, -1):
        (y,) = run(lambda g, x: g.linear(x, weight), sign * x, number_format="int8")
        np.testing.assert_allclose(y, sign * 512.0, rtol=1e-6)


def test_weights_are_rounded_to_the_nearest_integer_of_each_row():
    weight = random(20, 30) * 10.0 ** np.arange(-10, 10, dtype=np.float32)[:, None]
    weight[3] = 0.0
    whole, scale = in_8_bits(weight)
    assert (whole.dtype, scale.dtype) == (np.int8, np.float32)
    assert set(np.abs(whole).max(1)) == {127, 0}
    assert (np.abs(whole * scale[:, None] - weight) <= 0.5001 * scale[:, None]).all()
    assert not whole[3].any()


def test_a_table_of_8_bits_gives_rows_and_scores():
    table, numbers, x = random(30, 12), np.array([[3, 0], [29, 3]]), random(5, 12)
    rounded, scale = in_8_bits(table)
    exact = rounded * scale[:, None].astype(np.float64)
    rows, scores = run(lambda g, n, x: (g.rows(table, n, 4.0), g.scores(x, table)), numbers, x, number_format="int8")
    np.testing.assert_allclose(rows, 4 * exact[numbers], rtol=1e-6)
    np.testing.assert_allclose(scores, by_definition(x, exact.astype(np.float32), 0.0), atol=1e-4)


# ------------------------------------------------------------------------------------------- CPUs without exact sums


def entry_of(session):
    options = session.get_session_options()
    try:
        return options.get_session_config_entry("session.x64quantprecision")
    except RuntimeError:  # it has no value
        return None


def saturating(monkeypatch):
    """Pairs of products are summed in 16 bits, as AVX2 does it."""
    run_session = onnxruntime.InferenceSession.run

    def run_probe(self, names, inputs, *rest):
        if [x.name for x in self.get_inputs()] != ["x"]:
            return run_session(self, names, inputs, *rest)
        pairs = min(2 * 255 * 127, 32767) * PROBE_WIDTH // 2 - 128 * 127 * PROBE_WIDTH
        return [np.full((1, PROBE_WIDTH), pairs / 127**2, np.float32)]

    monkeypatch.setattr(onnxruntime.InferenceSession, "run", run_probe)


def test_a_cpu_whose_sums_saturate_gets_the_slower_products(monkeypatch):
    folder = translation("int8")[1].folder.path
    saturating(monkeypatch)
    translator = Translator(folder)
    assert translator.folder.slower_products
    assert {entry_of(session) for session in (translator.encoder, translator.steps)} == {"1"}
    forced = Translator(folder, exact_products=False)
    assert {entry_of(session) for session in (forced.encoder, forced.steps)} == {None}


def test_the_probe_asks_for_what_this_cpu_computes():
    """Whatever it is, the probe of a session with the slower products is exact."""
    folder = translation("int8")[1].folder
    row = np.ones((1, PROBE_WIDTH), np.float32)
    (y,) = folder.session(PROBE, slower_products=True).run(None, {"x": row})
    np.testing.assert_allclose(y, PROBE_WIDTH, rtol=1e-6)
    (y,) = folder.session(PROBE, slower_products=False).run(None, {"x": row})
    assert folder.slower_products == (not np.allclose(y, PROBE_WIDTH, rtol=1e-3))


def test_models_in_float32_have_no_probe():
    folder = translation()[1].folder
    assert not folder.slower_products
    assert not (folder.path / PROBE).exists()


def test_both_forms_of_products_give_the_same():
    rows = sources(9, 20)
    found = [
        ours(Translator(translation("int8", **SEARCHED["chunks"])[1].folder.path, exact_products=exact), rows)
        for exact in (True, False, None)
    ]
    for other in found[1:]:
        assert_same(other, found[0], 1e-5, tie=0)
    text = sources(30)[0]
    models = [LanguageModel(language("int8")[1].folder.path, exact_products=exact) for exact in (True, False)]
    scores = [model.score_tokens(text) for model in models]
    np.testing.assert_allclose(*scores, atol=1e-5)


def test_one_thread_or_several():
    for threads in (1, 2):
        session = Folder(translation()[1].folder.path, Translator.kind, threads).session("step.onnx")
        options = session.get_session_options()
        assert (options.intra_op_num_threads, options.inter_op_num_threads) == (threads, 1)
