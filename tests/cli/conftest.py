"""A fixture of the tests of `sweep` and of checkpoints that it reads."""

import pytest


@pytest.fixture
def sweep(sweep_folder, tmp_path, cli):
    """Runs the command on the CPU, with results in `tmp_path`; returns exit code, stdout, stderr."""

    def call(*arguments, model="rotary.pt", data="data"):
        return cli("sweep", sweep_folder / model, sweep_folder / data, f"--out={tmp_path / 'out'}", "--cpu", *arguments)

    return call
