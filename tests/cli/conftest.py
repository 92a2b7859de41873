"""Fixtures that call `mega-fairseq` in this process."""

import pytest

from mega_fairseq.cli.main import main
from tests.helpers.commands import refused_by


@pytest.fixture
def cli(capsys):
    """Runs `mega-fairseq ARGUMENTS`; returns exit code, stdout and stderr."""

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
def sweep(sweep_folder, tmp_path, cli):
    """Runs the command on the CPU, with results in `tmp_path`; returns exit code, stdout, stderr."""

    def call(*arguments, model="rotary.pt", data="data"):
        return cli("sweep", sweep_folder / model, sweep_folder / data, f"--out={tmp_path / 'out'}", "--cpu", *arguments)

    return call
