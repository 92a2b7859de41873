"""The files that `mega-fairseq inspect` writes, and its errors."""

import json
import re
from functools import partial

import pytest
import torch

from mega_fairseq.cli.main import main
from tests.helpers.commands import refused_by
from tests.helpers.released import run

pytestmark = pytest.mark.slow


@pytest.fixture
def content(sweep_folder):
    return torch.load(sweep_folder / "rotary.pt", weights_only=True)


@pytest.fixture
def call(sweep_folder, tmp_path, capsys):
    """Runs the command in this process; returns exit code, stdout and stderr."""

    def run_inspect(path=sweep_folder / "rotary.pt", out=tmp_path / "out"):
        return main(["inspect", str(path), f"--out={out}"]), *capsys.readouterr()

    return run_inspect


refused = partial(refused_by, "inspect")


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_diverged_model_is_refused_with_the_name_of_a_tensor(content, call, tmp_path, number):
    content["model"]["decoder.layers.1.mixer.ema.alpha"][0, 0, 0] = number
    torch.save(content, tmp_path / "any.pt")
    refused(call(tmp_path / "any.pt"), "in 1 of its tensors", "'decoder.layers.1.mixer.ema.alpha'", "diverged")


def test_the_command_prints_tables_and_the_names_of_its_files(sweep_folder, tmp_path):
    result = run("inspect", sweep_folder / "rotary.pt", "--out", tmp_path / "out")
    assert (result.returncode, result.stderr) == (0, "")
    starts = ["model", "parameters", "half-lives", "position scores", "wrote"]
    assert re.findall(rf"^({'|'.join(starts)})\b", result.stdout, re.MULTILINE) == starts
    assert result.stdout.splitlines()[-1] == f"wrote {tmp_path / 'out.json'}, {tmp_path / 'out.png'}"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.json", "out.png"]


def test_an_inspection_replaces_an_earlier_one(call, tmp_path):
    assert call()[0] == 0
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert sorted(before) == ["out.json", "out.png"]
    assert call()[0] == 0
    assert json.loads((tmp_path / "out.json").read_text()) == json.loads(before["out.json"])


@pytest.mark.parametrize(
    ("name", "text"), [("out.json", "precious"), ("out.json", "[1]"), ("out.json", "{}"), ("out.png", "precious")]
)
def test_other_files_are_not_overwritten(call, tmp_path, name, text):
    (tmp_path / name).write_text(text)
    refused(call(), tmp_path / name, "was not written by this command", "--out")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(name, text)]


@pytest.mark.parametrize(
    ("out", "words"), [("", "--out is ''"), ("missing/", "--out is 'missing/'"), ("missing/out", "the folder missing")]
)
def test_wrong_prefixes_are_refused_before_any_work(call, out, words):
    refused(call("none.pt", out), words)


def test_a_folder_with_the_name_of_an_output_file_is_refused(call, tmp_path):
    assert call()[0] == 0
    (tmp_path / "out.png").unlink()
    (tmp_path / "out.png").mkdir()
    refused(call(), "out.png is a folder")
