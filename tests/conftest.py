"""Fixtures for `mega-fairseq sweep`, its data and models."""

import pytest

from mega_fairseq.cli.main import main
from tests.sweeps import make_models


@pytest.fixture(scope="session")
def sweep_folder(tmp_path_factory):
    """The data and models of tests/sweeps.py."""
    place = tmp_path_factory.mktemp("sweep")
    make_models(place)
    return place


@pytest.fixture
def sweep(sweep_folder, tmp_path, capsys):
    """Run the command in this process, on the CPU, into `tmp_path`; returns exit code, stdout and stderr."""

    def call(*arguments, model="rotary.pt", data="data", device=("--cpu",)):
        files = [str(sweep_folder / model), str(sweep_folder / data), f"--out={tmp_path / 'out'}"]
        return main(["sweep", *files, *device, *arguments]), *capsys.readouterr()

    return call
