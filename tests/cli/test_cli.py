"""The command line of `mega-fairseq`, and the files that `convert` writes."""

import importlib.metadata
import logging
import os
import signal
import sys
from dataclasses import fields
from functools import partial
from pathlib import Path

import pytest
import torch
from fairseq import options as fairseq_options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import MODEL_DATACLASS_REGISTRY, MODEL_REGISTRY
from fairseq.tasks import TASK_DATACLASS_REGISTRY, TASK_REGISTRY

import mega_fairseq
from mega_fairseq.cli.main import main
from mega_fairseq.cli.output import quiet_logging
from mega_fairseq.cli.prepare import stratified
from mega_fairseq.models import presets as data
from tests.helpers.commands import ROOT, Running, fresh, refused_by
from tests.helpers.faults import killed_while_writing, no_space
from tests.helpers.released import NEEDS_TORCH, READS_SAFELY, checkpoint, model, save

REGISTRIES = (MODEL_DATACLASS_REGISTRY, TASK_DATACLASS_REGISTRY)


# ---------------------------------------------------------------------------------------- the command line


def test_console_script_and_module_run_the_same_command():
    scripts = {entry.name: entry.value for entry in importlib.metadata.distribution("mega-fairseq").entry_points}
    assert scripts == {"mega-fairseq": "mega_fairseq.cli.main:main"}
    assert fresh(sys.executable, "-m", "mega_fairseq.cli", "--version", cwd=ROOT).strip() == mega_fairseq.__version__


def test_a_program_that_calls_a_command_keeps_its_level_of_logging():
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with quiet_logging():
            assert not logging.getLogger().isEnabledFor(logging.WARNING)
        assert not logging.getLogger().isEnabledFor(logging.WARNING)
    finally:
        logging.disable(before)


def test_user_dir_prints_the_package_folder_without_importing_torch():
    program = (
        "import sys; from mega_fairseq.cli.main import main; main(); print({'torch', 'fairseq'} & set(sys.modules))"
    )
    said = fresh(sys.executable, "-c", program, "user-dir", cwd=ROOT)
    assert said.splitlines() == [str(Path(mega_fairseq.__file__).parent), "set()"]


@pytest.mark.slow
def test_a_command_of_fairseq_runs_with_the_plugin_and_keeps_its_exit_code(tmp_path):
    words = ["--task=mega_language_modeling", "--arch=mega_lm_small", "--max-tokens=9", "--save-dir", tmp_path]
    for given, code, end in (([tmp_path, *words], 1, f"{tmp_path}/dict.txt"), (words, 2, "are required: data")):
        found, said = Running("mega-fairseq", "train", *given).wait()
        assert (found, end in said.splitlines()[-1]) == (code, True), said


@pytest.mark.slow
def test_output_that_a_full_disk_cuts_is_an_error(tmp_path):
    (tmp_path / "out").touch()
    fault = partial(write_to, tmp_path / "out")
    code, said = Running("mega-fairseq", "options", "mega_lm", fault=fault).wait()  # prints more than a KiB
    assert (code, "File too large" in said) == (1, True)


def write_to(path):
    """Redirects stdout to a file on a full disk."""
    os.dup2(os.open(path, os.O_WRONLY), 1)
    no_space(1000)


@pytest.mark.parametrize(
    ("mistake", "message"),
    [(lambda: int("x"), "invalid literal"), (lambda: stratified([0], (2, 0, 0), "seed"), "shape mismatch")],
)
def test_a_mistake_in_the_program_shows_its_traceback(mistake, message, cli, monkeypatch):
    monkeypatch.setattr("mega_fairseq.cli.main.print_user_dir", lambda arguments: mistake())
    with pytest.raises(ValueError, match=message):
        cli("user-dir")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "mega-fairseq: the following arguments are required: COMMAND; "),
        (["options", "--none"], "mega-fairseq options: unrecognized arguments: --none; "),
        (["prepare", "digits", "out", "--none"], "mega-fairseq prepare digits: unrecognized arguments: --none; "),
    ],
)
def test_a_wrong_option_is_named_in_one_line(capsys, words, said):
    with pytest.raises(SystemExit, match="2"):
        main(words)
    error = capsys.readouterr().err
    assert error.startswith(said)
    assert f"; {said.split(':')[0]} --help" in error
    assert error.count("\n") == 1


def test_an_error_of_the_library_is_one_sentence(refuses, tmp_path):
    (tmp_path / "a.docs").write_bytes(b"\xff\n")
    refuses("documents", "score", *3 * [tmp_path / "a.docs"], words=["line 1", "UTF-8"])
    refuses("documents", "split", tmp_path, tmp_path, "--out=x", "--separator=a b", words=["--separator is 'a b'"])


# ---------------------------------------------------------------------------------------- options


def options(cli, *arguments):
    """The lines of `mega-fairseq options` by their first words, without wrapped texts."""
    code, said, _ = cli("options", *arguments)
    assert code == 0
    return {line.split()[0]: line for line in said.splitlines() if line[:1].strip()}


def test_options_lists_every_registered_architecture_and_task(cli):
    lines = options(cli)
    presets = {*data.CLASSIFIERS, *data.LANGUAGE_MODELS, *data.TRANSLATION}
    assert set(lines) >= presets | {name for name in [*MODEL_REGISTRY, *TASK_REGISTRY] if name.startswith("mega_")}
    assert lines["mega_lm_small"].split()[1:4] == ["4", "128", "256"]  # layers, width, chunk
    assert lines["mega_lra_text_chunk"].split()[1:4] == ["4", "128", "128"]


@pytest.mark.parametrize(
    "arch", ["mega_lm", "mega_lm_small", "mega_transformer_big", "mega_lra_text_chunk", "mega_language_modeling"]
)
def test_options_prints_the_options_and_defaults_that_fairseq_parses(arch, cli):
    lines = options(cli, arch)
    task = "translation" if "transformer" in arch else "mega_language_modeling"
    arguments = ["data", f"--task={task}", f"--arch={'mega_lm' if arch == task else arch}"]
    parsed = fairseq_options.parse_args_and_arch(fairseq_options.get_training_parser(task), arguments)
    cfg = convert_namespace_to_omegaconf(parsed)
    cfg = cfg.task if arch == task else cfg.model
    printed = {name[2:].replace("-", "_"): line.split()[1] for name, line in lines.items() if name.startswith("--")}
    assert printed == {name: str(getattr(cfg[name], "value", cfg[name])) for name in printed}
    own = {field.name for field in fields(REGISTRIES[arch == task][arch]) if field.metadata.get("help")} - {"data"}
    assert set(printed) == own


# -------------------------------------------------------------------------------------- files of convert


NEEDS_SAFE_READING = pytest.mark.skipif(not READS_SAFELY, reason=NEEDS_TORCH)


@pytest.fixture
def released_file(tmp_path):
    return save(checkpoint(model("pre_softmax_simple_noffn")), tmp_path / "released.pt")


@NEEDS_SAFE_READING
def test_convert_overwrites_a_file_only_with_force(released_file, tmp_path, cli, refuses):
    target = tmp_path / "ours.pt"
    target.write_text("precious")
    refuses("convert", released_file, target, words=[target, "--force"])
    assert cli("convert", released_file, target, "--force")[0] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours.pt", "released.pt"]
    assert "cfg" in torch.load(target, weights_only=True)


@NEEDS_SAFE_READING
def test_convert_checks_paths_before_any_work(released_file, tmp_path, refuses):
    for target in (released_file, tmp_path, tmp_path / "missing/ours.pt"):
        refuses("convert", released_file, target, "--force", words=[target if target.exists() else target.parent])
    refuses("convert", tmp_path / "none.pt", tmp_path / "ours.pt", words=["none.pt"])


@NEEDS_SAFE_READING
@pytest.mark.parametrize(("fault", "end"), [(partial(no_space, 10_000), 1), (killed_while_writing, -signal.SIGKILL)])
def test_a_full_disk_or_a_kill_leaves_the_target_unchanged(fault, end, released_file, tmp_path):
    target = tmp_path / "ours.pt"
    target.write_text("precious")
    code, said = Running("mega-fairseq", "convert", released_file, target, "--force", fault=fault).wait()
    assert (code, target.read_text()) == (end, "precious")
    if end == 1:
        refused_by("convert", (code, "", said), target, "File too large")
        assert len(list(tmp_path.iterdir())) == 2
