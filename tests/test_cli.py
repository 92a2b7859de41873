"""The command `mega-fairseq`, in processes of its own: what it prints, refuses, and leaves behind."""

import importlib
import importlib.metadata
import os
import signal
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch

import mega_fairseq
from mega_fairseq.cli.main import main
from tests.released import ROOT, assert_refused, checkpoint, model, refuse, run, save

SMALL = "pre_softmax_simple_noffn"


def python(*arguments):
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True)


@pytest.fixture
def released_file(tmp_path):
    return save(checkpoint(model(SMALL)), tmp_path / "released.pt")


# -------------------------------------------------------------------------------------- the command itself


def test_the_console_script_and_the_module_are_one_command():
    scripts = {entry.name: entry.value for entry in importlib.metadata.distribution("mega-fairseq").entry_points}
    assert scripts == {"mega-fairseq": "mega_fairseq.cli.main:main"}
    assert python("-m", "mega_fairseq.cli", "--version").stdout.strip() == mega_fairseq.__version__


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["convert", "one.pt"]])
def test_a_wrong_call_shows_the_usage(arguments):
    result = run(*arguments)
    assert result.returncode == 2
    assert result.stderr.startswith("usage: mega-fairseq")
    assert "Traceback" not in result.stderr


def test_user_dir_prints_the_folder_of_the_package_without_torch_or_fairseq():
    check = (
        "import atexit, sys; atexit.register(lambda: print({'torch', 'fairseq'} & set(sys.modules), file=sys.stderr))"
    )
    result = run("user-dir", program=check)
    assert Path(result.stdout.strip()) == Path(mega_fairseq.__file__).parent
    assert result.stderr.strip() == "set()"


def test_whoever_has_read_enough_is_shown_no_traceback():
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "mega_fairseq.cli", "user-dir"]
    result = subprocess.run(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (result.returncode, result.stderr) == (1, "")


def test_an_interrupted_command_is_one_line(monkeypatch, capsys):
    def interrupt(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib.import_module("mega_fairseq.cli.user_dir"), "run", interrupt)
    assert main(["user-dir"]) == 130
    assert capsys.readouterr().err == "mega-fairseq user-dir: interrupted\n"


def test_fairseq_takes_what_user_dir_prints():
    program = (
        "import sys; from argparse import Namespace; from fairseq import models, utils;"
        "utils.import_user_module(Namespace(user_dir=sys.argv[1])); print('mega_transformer' in models.MODEL_REGISTRY)"
    )
    result = python("-c", program, run("user-dir").stdout.strip())
    assert result.stdout.strip() == "True", result.stderr


# -------------------------------------------------------------------------------------- convert: files


def test_convert_says_what_it_made_and_what_it_changed(released_file, tmp_path):
    result = run("convert", released_file, tmp_path / "ours.pt")
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    for words in ("mega, de to en", "parameters", "float32", "taps", "optimizer"):
        assert words in result.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours.pt", "released.pt"]


def test_convert_overwrites_only_when_forced(released_file, tmp_path):
    target = tmp_path / "ours.pt"
    target.write_text("precious")
    assert_refused(run("convert", released_file, target), target, "exists", "--force")
    assert target.read_text() == "precious"
    assert run("convert", released_file, target, "--force").returncode == 0
    assert "cfg" in torch.load(target, weights_only=True)


def test_convert_never_writes_over_its_input(released_file):
    before = released_file.read_bytes()
    assert_refused(run("convert", released_file, released_file, "--force"), "also the input")
    assert released_file.read_bytes() == before


@pytest.mark.parametrize(("target", "words"), [("missing/ours.pt", "does not exist"), ("folder", "is a folder")])
def test_convert_refuses_a_target_that_cannot_be_written(released_file, tmp_path, capsys, target, words):
    (tmp_path / "folder").mkdir()
    refuse(capsys, released_file, tmp_path / target, "--force", words=[tmp_path / target.split("/")[0], words])


def test_convert_refuses_a_source_that_is_not_there(tmp_path, capsys):
    refuse(capsys, tmp_path / "none.pt", tmp_path / "ours.pt", words=["none.pt", "No such file"])


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs POSIX")
@pytest.mark.parametrize("force", [True, False])
def test_a_full_disk_leaves_the_target_as_it_was(released_file, tmp_path, force):
    target = tmp_path / "ours.pt"
    if force:
        target.write_text("precious")
    full = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))"
    result = run("convert", released_file, target, *["--force"] * force, program=full)
    assert_refused(result, target, "was not written", "File too large", "make room")
    assert target.exists() == force
    assert not force or target.read_text() == "precious"
    assert len(list(tmp_path.iterdir())) == 1 + force


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs POSIX")
def test_a_process_killed_while_it_writes_leaves_the_target_as_it_was(released_file, tmp_path):
    target = tmp_path / "ours.pt"
    target.write_text("precious")
    killed = "import os, signal; os.fsync = lambda number: os.kill(os.getpid(), signal.SIGKILL)"
    assert run("convert", released_file, target, "--force", program=killed).returncode == -signal.SIGKILL
    assert target.read_text() == "precious"


# -------------------------------------------------------------------------------------- convert: reading


class Hostile:
    """Creates a file when it is unpickled in the ordinary way."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


def with_hostile(content, place, path):
    if place == "all":
        return Hostile(path)
    if place == "options":
        return {**content, "args": Namespace(**{**vars(content["args"]), "encoder_embed_path": Hostile(path)})}
    return {**content, place: Hostile(path)}


@pytest.mark.parametrize(
    ("place", "how"),
    [
        ("all", {}),
        ("args", {}),
        ("options", {}),
        ("model", {}),
        ("extra_state", {}),
        ("last_optimizer_state", {"_use_new_zipfile_serialization": False}),
    ],
)
def test_a_pickle_that_would_run_something_is_refused_and_runs_nothing(tmp_path, place, how):
    trap = tmp_path / "trap"
    source = save(with_hostile(checkpoint(model(SMALL)), place, trap), tmp_path / "hostile.pt", **how)
    assert_refused(run("convert", source, tmp_path / "ours.pt"), source, "open", "not executed")
    assert [path.name for path in tmp_path.iterdir()] == ["hostile.pt"]


def test_the_hostile_pickle_of_these_tests_does_run_where_nobody_refuses_it(tmp_path):
    save(Hostile(tmp_path / "trap"), tmp_path / "hostile.pt")
    torch.load(tmp_path / "hostile.pt", weights_only=False).close()
    assert (tmp_path / "trap").exists()


@pytest.mark.parametrize("how", [{}, {"_use_new_zipfile_serialization": False}], ids=["zip", "legacy"])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.999])
def test_a_part_of_a_checkpoint_is_refused(tmp_path, capsys, share, how):
    source = save(checkpoint(model(SMALL)), tmp_path / "part.pt", **how)
    content = source.read_bytes()
    source.write_bytes(content[: int(share * len(content))])
    refuse(capsys, source, tmp_path / "ours.pt", words=[source, "only a part of one", "again"])
    assert [path.name for path in tmp_path.iterdir()] == ["part.pt"]


@pytest.mark.parametrize("content", [b"hello, world", b"PK\x03\x04 no archive", b"\x80\x02}."])
def test_a_file_that_is_no_checkpoint_is_refused(tmp_path, capsys, content):
    source = tmp_path / "any.pt"
    source.write_bytes(content)
    refuse(capsys, source, tmp_path / "ours.pt", words=[source])
