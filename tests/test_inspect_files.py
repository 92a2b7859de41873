"""What `mega-fairseq inspect` refuses, and which files it writes. Untrusted checkpoints are in test_untrusted.py."""

import json
import re
from functools import partial

import pytest
import torch

from mega_fairseq.cli.main import main
from tests.commands import refused_by
from tests.released import run


@pytest.fixture
def content(sweep_folder):
    return torch.load(sweep_folder / "rotary.pt", weights_only=True)


@pytest.fixture
def inspect(sweep_folder, tmp_path, capsys):
    """The command in this process; its exit code, and what it said on both streams."""

    def call(path=sweep_folder / "rotary.pt", out=tmp_path / "out"):
        return main(["inspect", str(path), f"--out={out}"]), *capsys.readouterr()

    return call


refused = partial(refused_by, "inspect")


# ------------------------------------------------------------------------------------------ models


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_model_that_has_diverged_is_refused_by_the_tensor_that_says_so(content, inspect, tmp_path, number):
    content["model"]["decoder.layers.1.mixer.ema.alpha"][0, 0, 0] = number
    torch.save(content, tmp_path / "any.pt")
    refused(inspect(tmp_path / "any.pt"), "in 1 of", "'decoder.layers.1.mixer.ema.alpha'", "diverged")


# ------------------------------------------------------------------------------------------- files


def test_a_shell_sees_the_tables_and_no_log(sweep_folder, tmp_path):
    result = run("inspect", sweep_folder / "rotary.pt", "--out", tmp_path / "out")
    assert (result.returncode, result.stderr) == (0, "")
    assert re.findall(r"^(model|parameters|half-lives)\b", result.stdout, re.MULTILINE) == [
        "model",
        "parameters",
        "half-lives",
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.json", "out.png"]


def test_an_inspection_replaces_an_earlier_one(inspect, tmp_path):
    assert inspect()[0] == 0
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert sorted(before) == ["out.json", "out.png"]
    assert inspect()[0] == 0
    assert json.loads((tmp_path / "out.json").read_text()) == json.loads(before["out.json"])


@pytest.mark.parametrize(
    ("name", "text"), [("out.json", "precious"), ("out.json", "[1]"), ("out.json", "{}"), ("out.png", "precious")]
)
def test_files_of_somebody_else_are_not_overwritten(inspect, tmp_path, name, text):
    (tmp_path / name).write_text(text)
    refused(inspect(), tmp_path / name, "no inspection wrote it", "--out")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(name, text)]


@pytest.mark.parametrize(
    ("out", "words"), [("", "--out is ''"), ("missing/", "--out is 'missing/'"), ("missing/out", "the folder missing")]
)
def test_prefixes_that_name_no_files_are_refused_before_any_work(inspect, out, words):
    refused(inspect("none.pt", out), words)


def test_a_folder_in_the_place_of_a_file_is_refused(inspect, tmp_path):
    assert inspect()[0] == 0
    (tmp_path / "out.png").unlink()
    (tmp_path / "out.png").mkdir()
    refused(inspect(), "out.png exists")
