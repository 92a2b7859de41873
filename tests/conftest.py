"""Profiles of hypothesis, and fixtures for several files: data, models and commands.

HYPOTHESIS_PROFILE chooses a profile. The default draws the same examples in every run, so that failures are
reproducible. "fast" draws few examples, for `make test-fast`; "explore" draws more and new ones.
"""

import functools
import os
import subprocess
import sysconfig
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from tests.helpers import classifiers as classifiers_of
from tests.helpers.commands import ON_CPUS, preprocess_text, trained
from tests.helpers.forking import python
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


@pytest.fixture
def torchrun():
    """Starts processes as documented, but forked from one that has imported fairseq; their output is in `output`."""
    scripts, started = Path(sysconfig.get_path("scripts")), []
    environment = ["--distributed-world-size=2", "--distributed-init-method=env://", "--distributed-rank=-1"]

    def begin(output, launch, *words):
        command = [scripts / "torchrun", *launch, "--no-python", python(), "-m", "fairseq_cli.train", *words, *ON_CPUS]
        with open(output, "w") as said:
            started.append(subprocess.Popen([*map(str, command), *environment], stdout=said, stderr=said))
        return started[-1]

    yield begin
    for process in started:
        process.terminate()
        process.wait(60)
