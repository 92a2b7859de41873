"""Fixtures for several files about exported models."""

import pytest

from mega_runtime import decoder
from tests.helpers.pieces import few_pieces


@pytest.fixture(scope="session")
def pieces_model(tmp_path_factory):
    return few_pieces(tmp_path_factory.mktemp("pieces"))


@pytest.fixture
def full(monkeypatch):
    """Searches have little storage: places are dropped at nearly each step."""
    monkeypatch.setattr(decoder, "FREE", 1)
    monkeypatch.setattr(decoder, "FREE_OF_BATCHES", 1)
