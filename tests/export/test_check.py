"""The check at the end of an export: small differences are told, large ones are refused."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mega_fairseq.export import check
from mega_fairseq.export.folder import write_language_model, write_translation
from mega_fairseq.tasks.mega_translation import MegaTranslationConfig, MegaTranslationTask
from mega_runtime import Classifier
from mega_runtime.decoder import Candidates
from mega_runtime.search import Options, Search, Special
from tests.helpers.exported import documents, exported_classifier, language, new_folder, project_classifier
from tests.helpers.small_models import language_model, translation_model

LINES = {"cross_attention_positions": "sentence", "normalize_before": True}


def checked_documents(number_format):
    task, model, translator = documents.__wrapped__(number_format, **LINES)
    return model.encoder, lambda: check.check_translation(translator.folder.path, model, task)


def checked_language_model(number_format):
    model, exported = language.__wrapped__(number_format)
    return model.decoder, lambda: check.check_language_model(exported.folder.path, model)


def checked_classifier(number_format):
    project = project_classifier("values", "int16")
    folder = exported_classifier("values", "int16", number_format=number_format)
    return project.models[0].encoder, lambda: check.check_classifier(folder, project)


@pytest.mark.parametrize(("number_format", "most"), [("float32", 1e-5), ("int8", 0.1)])
@pytest.mark.parametrize("checked", [checked_documents, checked_language_model, checked_classifier])
def test_differences_are_measured_and_large_ones_are_refused(checked, number_format, most):
    stack, call = checked(number_format)
    found = call()
    assert 0 < found["rms"] <= found["largest"]
    assert found["rms"] < most
    if number_format == "float32":
        assert found.get("same hypotheses", "4 of 4") == "4 of 4"
    with torch.no_grad():  # after the export
        for parameter in stack.parameters():
            parameter.mul_(-2.0)
    remedy = {"float32": "generate with fairseq", "int8": "give --format float32"}[number_format]
    with pytest.raises(ValueError, match=f"differs from the checkpoint by .*; {remedy}"):
        call()


def checked_short_translation(longest, **options):
    model = translation_model(max_source_positions=longest, max_target_positions=longest, **options)
    folder = new_folder()
    write_translation(folder, model)
    dictionary = model.decoder.dictionary
    task = MegaTranslationTask(MegaTranslationConfig(), dictionary, dictionary)
    return check.check_translation(folder, model, task)


def checked_short_text(longest):
    model = language_model(decoder_chunk_size=-1, rel_pos_bias="simple", max_target_positions=longest)
    folder = new_folder()
    write_language_model(folder, model)
    return check.check_language_model(folder, model)


@pytest.mark.parametrize("checked", [checked_short_translation, checked_short_text])
def test_models_of_short_texts_are_compared_on_shorter_ones(checked):
    assert checked(12)["rms"] < 1e-4


def test_models_of_few_types_are_searched_with_fewer_beams():
    assert checked_short_translation(12, types=8)["rms"] < 1e-4


def test_probabilities_that_are_not_numbers_are_refused(monkeypatch):
    search = Search(np.array([5]), Options(beam=2), Special(1, 2, 3), None)
    log_probs = np.full((2, 5), np.nan, np.float32)
    with pytest.raises(FloatingPointError, match="not numbers"):
        search.step(Candidates(log_probs, np.zeros((2, 5), int), log_probs[:, :2]))
    ours = Classifier(exported_classifier())
    monkeypatch.setattr(ours, "encoder", SimpleNamespace(run=lambda *call: [log_probs]))
    with pytest.raises(FloatingPointError, match="not numbers"):
        ours.predict(["w1"])
