"""The Python that forks commands for the tests behaves as any other."""

import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

import mega_fairseq
from tests.helpers import forking, recipes

VERSION = f"{mega_fairseq.__version__}\n"
COMMAND = ["-m", "mega_fairseq.cli", "--version"]


@pytest.mark.slow
def test_paths_of_python_and_of_temporary_files_may_contain_spaces_and_quotes(tmp_path, monkeypatch):
    folder = Path(tempfile.mkdtemp(prefix="it's a "))  # a short path, for the address of a socket; removed at the end
    (folder / "interpreter").symlink_to(sys.executable)
    monkeypatch.setattr(sys, "executable", str(folder / "interpreter"))
    monkeypatch.setattr(forking, "tempfile", SimpleNamespace(mkdtemp=lambda: str(folder)))
    python = forking.python.__wrapped__()
    monkeypatch.setattr(recipes, "python", lambda: python)
    for path in (python, recipes.fake_python(tmp_path, "false", "true")):
        assert subprocess.check_output([path, "-c", "print('a new process')"], text=True) == "a new process\n"
        assert subprocess.check_output([path, *COMMAND], text=True) == VERSION


@pytest.mark.slow
def test_a_forked_command_has_the_streams_of_its_caller():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        subprocess.run([forking.python(), *COMMAND], stdout=theirs, check=True)
        assert ours.recv(100).decode() == VERSION
