"""Fixtures for several files: data, models and commands."""

import functools
import os
import shutil

import pytest
import torch

import tests.helpers.profiles  # noqa: F401 - loads the profile of hypothesis
from mega_fairseq.cli.main import main
from tests.helpers import commands
from tests.helpers.classifiers import write_and_train
from tests.helpers.commands import MEGA, PLUGIN, TRAINING, fairseq, once, preprocess_text, refused_by, trained
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


@pytest.fixture(scope="session", autouse=True)
def _shared(tmp_path_factory):
    folder = tmp_path_factory.getbasetemp()
    commands.SHARED = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@pytest.fixture(scope="session")
def sweep_folder():
    """The data and models of tests/helpers/sweeps.py."""
    return once("sweeps", make_models)


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """Data for language models."""
    return preprocess_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="session")
def translation():
    """A translation model after three updates and one validation, and the output of its training."""
    return trained("translation")


@pytest.fixture(scope="session")
def bible():
    """Data of a few chapters, with the chapter of each line."""

    def binarise(folder):
        small_bible(folder)
        words = ["--source-lang=en", "--target-lang=de", "--joined-dictionary", f"--destdir={folder}/bin"]
        fairseq("preprocess", *words, *(f"--{split}pref={folder / split}" for split in ("train", "valid", "test")))
        for path in folder.glob("*.docs"):
            shutil.copy(path, folder / "bin")
        return folder / "bin"

    return once("bible", binarise)


@pytest.fixture(scope="session")
def trained_on_documents(bible):
    """The folder of a model of documents, after three updates."""

    def train(folder):
        task = [*PLUGIN, "--task=mega_document_translation", "--source-lang=en", "--target-lang=de"]
        model = [*MEGA, "--rel-pos-bias=rotary", "--cross-attention-positions=sentence", "--cross-attention-window=1"]
        windows = ["--window-tokens=280", "--valid-window-tokens=200"]
        fairseq("train", bible, *task, *model, *windows, *TRAINING, "--save-dir", folder, "--max-update=3")
        return folder

    return once("documents", train)


@pytest.fixture(scope="session")
def prepared_bible(tmp_path_factory):
    """The recipe of the Bible, after prepare.sh."""
    recipe = bible_recipe(tmp_path_factory.mktemp("a place"), small_bible(tmp_path_factory.mktemp("corpus")))
    recipe.run("prepare.sh")
    return recipe


@pytest.fixture(scope="session")
def classifiers():
    """Trains a classifier of tests/helpers/classifiers.py for one kind of inputs once."""
    return lambda kind: once(f"classifier-{kind}", functools.partial(write_and_train, kind))


@pytest.fixture(scope="session")
def converted(tmp_path_factory):
    """A function from a golden model to the path of its converted checkpoint."""
    return converter(tmp_path_factory.mktemp("converted"))


@pytest.fixture
def cli(capsys):
    """Runs `mega-fairseq ARGUMENTS` in this process; returns exit code, stdout and stderr."""

    def call(*arguments):
        capsys.readouterr()  # discards earlier output
        return main([*map(str, arguments)]), *capsys.readouterr()

    return call


@pytest.fixture
def refuses(cli, tmp_path):
    """Checks that `mega-fairseq ARGUMENTS` fails with an error that contains these words, and changes no file."""

    def files():
        return {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")}

    def call(*arguments, words):
        before = files()
        refused_by(arguments[0], cli(*arguments), *words)
        assert files() == before

    return call


@pytest.fixture
def edited(tmp_path):
    """Writes a checkpoint after applying `change` to its content."""

    def make(path, change):
        content = torch.load(path, weights_only=False)
        change(content)
        torch.save(content, tmp_path / "edited.pt")
        return tmp_path / "edited.pt"

    return make
