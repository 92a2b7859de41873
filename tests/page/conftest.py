"""Fixtures for the tests of the page."""

import shutil

import pytest

from tests.helpers import page
from tests.helpers.pieces import pieces_model


@pytest.fixture(scope="session")
def node():
    if shutil.which("node") is None:
        pytest.skip("Node.js is not installed")
    with page.Node() as running:
        yield running


@pytest.fixture(scope="session")
def runtime(node):
    """Node.js with onnxruntime-web."""
    if page.MISSING is not None:
        pytest.skip(page.MISSING)
    return node


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """A folder with a model of each kind, as the page serves them, in float32."""
    folder = tmp_path_factory.mktemp("models")
    pieces = pieces_model(tmp_path_factory.mktemp("pieces"))
    page.write_documents(folder / "documents", pieces)
    page.write_text_of_bytes(folder / "bytes")
    page.write_digits(folder / "digits")
    return folder
