"""Fixtures for several files about exported models."""

import pytest

from tests.helpers.pieces import few_pieces


@pytest.fixture(scope="session")
def pieces_model(tmp_path_factory):
    return few_pieces(tmp_path_factory.mktemp("pieces"))
