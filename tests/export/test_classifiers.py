"""Exported classifiers predict what the project's do: tokens, bytes and values, alone, in pairs and in batches."""

import functools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mega_fairseq.data.classification.inputs import byte_dictionary
from mega_fairseq.export.folder import write_classifier
from mega_fairseq.tasks import MegaClassificationConfig, MegaClassificationTask
from mega_fairseq.tasks.prediction import Classifier as Project
from mega_runtime import Classifier
from tests.helpers.classifiers import assert_same_predictions
from tests.helpers.exported import new_folder, randomised
from tests.helpers.golden_models import dictionary
from tests.helpers.profiles import examples
from tests.helpers.small_models import CHUNK, TYPES, classifier, encoder

LABELS = ["first", "second", "the third"]
KINDS = {
    "tokens": (classifier, {}),
    "tokens in chunks, mean": (classifier, {"encoder_chunk_size": CHUNK, "pooling": "mean", "rel_pos_bias": "rotary"}),
    "tokens, deep head": (classifier, {"classifier_layers": 2, "classifier_dim": 6, "normalization_type": "batchnorm"}),
    "tokens, truncated": (classifier, {"truncation_length": 4, "attention_activation_fn": "laplace"}),
    "pairs": (classifier, {"pairs": True, "normalize_before": True}),
    "encoder": (encoder, {"normalize_embedding": True}),
    "encoder, types, mean": (encoder, {"token_types": 2, "pooling": "mean", "lm_head": "none"}),
    "bytes": (classifier, {"normalization_type": "scalenorm"}),
    "pairs of bytes": (classifier, {"pairs": True, "encoder_n_dim": 16}),
    "uint8": (classifier, {"encoder_chunk_size": CHUNK}),
    "int16": (classifier, {"normalization_type": "syncbatchnorm", "normalize_before": True}),
    "float": (classifier, {"pooling": "first"}),
    "pairs of float": (classifier, {"pairs": True}),
}
each = pytest.mark.parametrize("name", KINDS)


def kind_of(name):
    return "bytes" if "bytes" in name else "values" if name.split()[-1] in ("uint8", "int16", "float") else "tokens"


@functools.lru_cache(maxsize=None)
def both(name, number_format="float32", **task):
    """The project's classifier and ours."""
    (build, options), kind = KINDS[name], kind_of(name)
    words = {"tokens": dictionary(TYPES), "bytes": byte_dictionary(), "values": None}[kind]
    model = randomised(build(None if words is None else len(words), **options), 0.2)
    values = {"values_mean": 0.3, "values_deviation": 0.5} if kind == "values" else {}
    made = MegaClassificationTask(MegaClassificationConfig(input_kind=kind, **values, **task), words, LABELS)
    made.number_type = name.split()[-1] if kind == "values" else None
    project, folder = Project(made, [model]), new_folder()
    write_classifier(folder, project, number_format)
    return project, Classifier(folder)


def inputs(name, lengths, seed=0):
    draw = np.random.default_rng(seed)

    def one(length):
        kind = kind_of(name)
        if kind == "tokens":
            return " ".join(f"w{number}" for number in draw.integers(0, TYPES, length))  # some are unknown
        if kind == "bytes":
            return bytes(draw.integers(0, 256, length).tolist()) if length % 2 else "\u20ac" * (length // 2)
        number_type = name.split()[-1]
        if number_type == "float":
            return draw.standard_normal(length).astype(draw.choice(["float16", "float32", "float64"]))
        return draw.integers(np.iinfo(number_type).min, np.iinfo(number_type).max, length).astype(number_type)

    return [(one(n), one(max(1, n - 3))) if name.startswith("pairs") else one(n) for n in lengths]


@each
@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=7), size=st.integers(1, 4), seed=st.integers(0, 9))
@examples(12)
def test_predictions_are_those_of_the_project_in_any_batches(name, lengths, size, seed):
    project, ours = both(name)
    given_inputs = inputs(name, lengths, seed)
    found = ours.predict(given_inputs, size)
    assert_same_predictions(found, project.predict(given_inputs))
    assert all(list(one.probabilities) == LABELS for one in found)
    assert_same_predictions([ours.predict([one])[0] for one in given_inputs], ours.predict(given_inputs))


@pytest.mark.parametrize("name", ["tokens", "pairs of bytes", "uint8"])
def test_predictions_in_8_bits_are_near(name):
    project, ours = both(name, "int8")
    given_inputs = inputs(name, range(1, 20))
    assert_same_predictions(ours.predict(given_inputs), project.predict(given_inputs), 0.05)
    with pytest.raises(AssertionError):
        assert_same_predictions(ours.predict(given_inputs), project.predict(given_inputs))


@pytest.mark.parametrize("name", ["tokens", "bytes", "pairs"])
def test_inputs_have_the_first_token_of_the_training(name):
    project, ours = both(name, init_token=2)
    given_inputs = inputs(name, [1, 5, 19])
    assert_same_predictions(ours.predict(given_inputs), project.predict(given_inputs))
    with pytest.raises(AssertionError):
        assert_same_predictions(ours.predict(given_inputs), both(name)[1].predict(given_inputs))


@pytest.mark.parametrize(
    ("name", "first"),
    [("tokens", None), ("tokens", 2), ("pairs of bytes", None), ("pairs of bytes", 2), ("float", None)],
)
def test_long_inputs_are_cut_as_in_the_training_with_a_warning(name, first, caplog):
    project, ours = both(name, shorten_method="truncate", init_token=first)
    given_inputs = inputs(name, [1, 2, 62, 63, 64, 65, 99])
    for some, warnings in ((slice(2), 0), (slice(2, None), 1), (slice(None), 1)):
        assert_same_predictions(ours.predict(given_inputs[some]), project.predict(given_inputs[some]))
        assert sum("reads the first 64" in record.message for record in caplog.records) == warnings


def test_integers_in_lists_and_larger_types_are_numbers_of_the_training():
    project, ours = both("uint8")
    row = [0, 255, 7]
    expected = project.predict([np.array(row, np.uint8)])
    for given_row in (row, tuple(row), np.array(row), np.array(row, np.int16)):
        assert_same_predictions(ours.predict([given_row]), expected)
    assert_same_predictions(both("float")[1].predict([[0.5, 1]]), both("float")[0].predict([np.array([0.5, 1])]))


def test_many_inputs_keep_their_order():
    project, ours = both("tokens")
    given_inputs = inputs("tokens", np.random.default_rng(0).integers(1, 30, 50))
    assert_same_predictions(ours.predict(iter(given_inputs)), project.predict(given_inputs))
    assert ours.predict([]) == []


@pytest.mark.parametrize(
    ("name", "wrong", "error", "words"),
    [
        ("tokens", "w1 w2", TypeError, "list of inputs"),
        ("tokens", [b"w1"], TypeError, "input 1 is of type bytes; give str"),
        ("tokens", ["w1", " "], ValueError, "input 2 is empty"),
        ("tokens", ["w1 <pad>"], ValueError, "input 1 has the word <pad>; remove it"),
        ("tokens", ["w1 " * 64], ValueError, "input 1 has 65 positions and the model reads 64"),
        ("bytes", b"ab", TypeError, "list of inputs"),
        ("bytes", [[1, 2]], TypeError, "input 1 is of type list; give str or bytes"),
        ("bytes", [""], ValueError, "input 1 is empty"),
        ("bytes", ["a", "\ud83d"], ValueError, "input 2 has a surrogate"),
        ("tokens", ["w1 \ud83d"], ValueError, "input 1 has a surrogate"),
        ("pairs", ["w1"], ValueError, "input 1 is not a pair"),
        ("pairs", [("w1", "w2", "w3")], ValueError, "input 1 is not a pair"),
        ("pairs", [("w1", "w2"), ("w1", "")], ValueError, "input 2 is empty"),
        ("uint8", [[0.5]], ValueError, "input 1 .* of type uint8"),
        ("uint8", [[1, 256]], ValueError, "input 1 .* 0 to 255"),
        ("uint8", [np.ma.masked_array([1, 2], [0, 1])], ValueError, "input 1 is a masked array"),
        ("uint8", [[-1]], ValueError, "input 1 .* 0 to 255"),
        ("uint8", [[]], ValueError, "input 1 .* of type uint8"),
        ("uint8", [np.zeros((2, 2), np.uint8)], ValueError, r"input 1 has the shape \(2, 2\)"),
        ("int16", [[1], [40_000]], ValueError, "input 2 .* -32768 to 32767"),
        ("float", [[1, 2]], ValueError, "input 1 .* of type float"),
        ("float", [[0.5], [np.nan]], ValueError, "input 2 .* not finite"),
        ("float", [[1e300]], ValueError, "input 1 .* not finite"),
        ("float", [[0.5], [1e38, -1e38]], ValueError, "input 2 are not numbers; its values are too large"),
        ("float", [["a"]], ValueError, "input 1 .* of type float"),
    ],
)
def test_wrong_inputs_are_refused_by_number(name, wrong, error, words):
    with pytest.raises(error, match=words):
        both(name)[1].predict(wrong)


def test_a_batch_has_at_least_one_input():
    for size in (0, -1, 1.5):
        with pytest.raises(ValueError, match=f"batch_size is {size}; give a whole number from 1"):
            both("uint8")[1].predict([[1]], batch_size=size)


def test_numbers_of_another_length_than_in_the_training_are_refused():
    project, _ = both("float")
    folder = new_folder()
    project.task.length = 5
    write_classifier(folder, project)
    project.task.length = None
    with pytest.raises(ValueError, match=r"input 1 has the shape \(4,\) .*; give one row of 5 numbers"):
        Classifier(folder).predict([[0.5] * 4])


def test_values_of_an_unknown_type_cannot_be_exported():
    project, _ = both("float")
    project.task.number_type = None
    with pytest.raises(ValueError, match="uint8, int16 or floats"):
        write_classifier(new_folder(), project)
    project.task.number_type = "float"


def test_an_encoder_without_pads_is_not_the_model(monkeypatch):
    """The broken twin: an encoder that takes pads for inputs."""
    project, ours = both("tokens in chunks, mean")
    run, given_inputs = ours.encoder.run, inputs("tokens", [3, 20])
    assert_same_predictions(ours.predict(given_inputs), project.predict(given_inputs))
    everything = lambda names, x: run(names, {**x, "real": np.ones_like(x["real"])})  # noqa: E731
    monkeypatch.setattr(ours, "encoder", type("Twin", (), {"run": staticmethod(everything)}))
    with pytest.raises(AssertionError):
        assert_same_predictions(ours.predict(given_inputs), project.predict(given_inputs))
