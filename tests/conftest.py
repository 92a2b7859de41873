"""The command `mega-fairseq sweep` and what it is tried on, for the files that test it."""

import pytest

from mega_fairseq.cli.main import main
from tests.sweeps import make_models


@pytest.fixture(scope="session")
def sweep_folder(tmp_path_factory):
    """Text, binarised, and a model of it with each of two position biases."""
    place = tmp_path_factory.mktemp("sweep")
    make_models(place)
    return place


@pytest.fixture
def sweep(sweep_folder, tmp_path, capsys):
    """The command in this process, on the CPU, into `tmp_path`; its exit code, and what it said on both streams."""

    def call(*arguments, model="rotary.pt", data="data", device=("--cpu",)):
        files = [str(sweep_folder / model), str(sweep_folder / data), f"--out={tmp_path / 'out'}"]
        return main(["sweep", *files, *device, *arguments]), *capsys.readouterr()

    return call
