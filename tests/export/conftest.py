"""Fixtures for several files about exported models."""

import pytest
from fairseq.data import Dictionary

from mega_fairseq.export.folder import write_language_model
from mega_runtime import LanguageModel, decoder
from tests.helpers.exported import new_folder
from tests.helpers.pieces import few_pieces
from tests.helpers.small_models import language_model


@pytest.fixture(scope="session")
def pieces_model(tmp_path_factory):
    return few_pieces(tmp_path_factory.mktemp("pieces"))


@pytest.fixture
def full(monkeypatch):
    """Searches have little storage: places are dropped at nearly each step."""
    monkeypatch.setattr(decoder, "FREE", 1)
    monkeypatch.setattr(decoder, "FREE_OF_BATCHES", 1)


@pytest.fixture(scope="session")
def of_bytes():
    """A language model of bytes."""
    numbers = Dictionary()
    for number in range(256):
        numbers.add_symbol(str(number))
    model, folder = language_model(len(numbers)), new_folder()
    model.decoder.dictionary = numbers
    write_language_model(folder, model, of_bytes=True)
    return LanguageModel(folder)
