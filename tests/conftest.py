"""Fixtures for several files: data, models and commands."""

import functools
import shutil

import pytest
import torch

import tests.helpers.profiles  # noqa: F401 - loads the profile of hypothesis
from tests.helpers import classifiers as classifiers_of
from tests.helpers.commands import fairseq, preprocess_text, trained
from tests.helpers.recipes import bible_recipe, small_bible
from tests.helpers.released import converter
from tests.helpers.sweeps import make_models


@pytest.hookimpl(hookwrapper=True)
def pytest_make_collect_report(collector):
    """Skips files that import Triton where it is missing: torch brings it only with CUDA, and pip not everywhere."""
    report = (yield).get_result()
    error = report.call.excinfo and report.call.excinfo.value.__cause__
    if isinstance(error, ModuleNotFoundError) and error.name.partition(".")[0] == "triton":
        report.outcome, report.longrepr = "skipped", (str(collector.path), None, "Skipped: Triton is not installed")


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
def bible(tmp_path_factory):
    """Data of a few chapters, with the chapter of each line."""
    folder = small_bible(tmp_path_factory.mktemp("bible"))
    words = ["--source-lang=en", "--target-lang=de", "--joined-dictionary", f"--destdir={folder}/bin"]
    fairseq("preprocess", *words, *(f"--{split}pref={folder / split}" for split in ("train", "valid", "test")))
    for path in folder.glob("*.docs"):
        shutil.copy(path, folder / "bin")
    return folder / "bin"


@pytest.fixture(scope="session")
def prepared_bible(tmp_path_factory):
    """The recipe of the Bible, after prepare.sh."""
    recipe = bible_recipe(tmp_path_factory.mktemp("a place"), small_bible(tmp_path_factory.mktemp("corpus")))
    recipe.run("prepare.sh")
    return recipe


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
