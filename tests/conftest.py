"""Profiles of hypothesis, and fixtures for several files: data, models and commands.

HYPOTHESIS_PROFILE chooses a profile. The default draws the same examples in every run, so that failures are
reproducible. "fast" draws few examples, for `make test-fast`; "explore" draws more and new ones.
"""

import functools
import os

import pytest
import torch
from hypothesis import settings

from tests.helpers import classifiers as classifiers_of
from tests.helpers.commands import preprocess_text, trained
from tests.helpers.released import converter
from tests.helpers.sweeps import make_models

settings.register_profile("repeatable", deadline=None, derandomize=True, max_examples=12, database=None)
settings.register_profile("fast", settings.get_profile("repeatable"), max_examples=3)
settings.register_profile("explore", deadline=None, max_examples=300, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


@pytest.fixture(scope="session")
def sweep_folder(tmp_path_factory):
    """The data and models of tests/helpers/sweeps.py."""
    place = tmp_path_factory.mktemp("sweep")
    make_models(place)
    return place


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """Data for language models."""
    return preprocess_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="session")
def translation():
    """A translation model after three updates and one validation, and the output of its training."""
    return trained("translation")


@pytest.fixture(scope="session")
def classifiers(tmp_path_factory):
    """Trains a classifier of tests/helpers/classifiers.py for one kind of inputs once."""

    @functools.lru_cache(maxsize=None)
    def trained(kind):
        data = classifiers_of.write_data(tmp_path_factory.mktemp(kind), kind)
        return classifiers_of.train(tmp_path_factory.mktemp(f"{kind}-model"), data, kind)

    return trained


@pytest.fixture(scope="session")
def converted(tmp_path_factory):
    """A function from a golden model to the path of its converted checkpoint."""
    return converter(tmp_path_factory.mktemp("converted"))


@pytest.fixture
def edited(tmp_path):
    """Writes a checkpoint after applying `change` to its content."""

    def make(path, change):
        content = torch.load(path, weights_only=False)
        change(content)
        torch.save(content, tmp_path / "edited.pt")
        return tmp_path / "edited.pt"

    return make
