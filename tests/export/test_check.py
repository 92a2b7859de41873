"""The comparison with the checkpoint at the end of an export."""

import pytest

from mega_fairseq.export.check import check_language_model, check_translation
from mega_fairseq.export.folder import write_language_model, write_translation
from mega_fairseq.tasks.mega_translation import MegaTranslationConfig, MegaTranslationTask
from tests.helpers.exported import new_folder
from tests.helpers.small_models import language_model, translation_model


def checked_translation(longest):
    model, folder = translation_model(max_source_positions=longest, max_target_positions=longest), new_folder()
    write_translation(folder, model)
    dictionary = model.decoder.dictionary
    task = MegaTranslationTask(MegaTranslationConfig(), dictionary, dictionary)
    return check_translation(folder, model, task)


def checked_language_model(longest):
    model = language_model(decoder_chunk_size=-1, rel_pos_bias="simple", max_target_positions=longest)
    folder = new_folder()
    write_language_model(folder, model)
    return check_language_model(folder, model)


@pytest.mark.parametrize("checked", [checked_translation, checked_language_model])
def test_models_of_short_texts_are_compared_on_shorter_ones(checked):
    assert checked(12)["rms"] < 1e-4
