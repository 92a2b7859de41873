"""`mega-fairseq export`: what it reads beside the checkpoint, and its comparison with it at the end."""

import pytest

from mega_fairseq.cli import UserError
from mega_fairseq.cli.checkpoint.trained import Checkpoint
from mega_fairseq.cli.export import _translation_task
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
    model, folder = (
        language_model(decoder_chunk_size=-1, rel_pos_bias="simple", max_target_positions=longest),
        new_folder(),
    )
    write_language_model(folder, model)
    return check_language_model(folder, model)


@pytest.mark.parametrize("checked", [checked_translation, checked_language_model])
def test_models_of_short_texts_are_compared_on_shorter_ones(checked):
    assert checked(12)["rms"] < 1e-4


@pytest.mark.parametrize("given", [None, "de"])
def test_languages_that_the_training_found_by_the_names_of_its_files_are_found_again(given, tmp_path):
    for language, word in (("de", "Haus"), ("en", "house")):
        (tmp_path / f"dict.{language}.txt").write_text(f"{word} 1\n")
    options = {"_name": "translation", "data": str(tmp_path), "source_lang": given, "target_lang": given and "en"}
    checkpoint = Checkpoint({"task": options}, {})
    if given is None:
        with pytest.raises(UserError, match=f"does not say its languages, and {tmp_path} has no data of two; give"):
            _translation_task(checkpoint, None)
    (tmp_path / "train.de-en.de.idx").touch()
    task = _translation_task(checkpoint, None)
    assert "Haus" in task.source_dictionary
    assert "house" in task.target_dictionary
