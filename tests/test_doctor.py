"""`mega-fairseq doctor`: with everything installed, with nothing installed, and with broken packages."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mega_fairseq.cli.doctor import fairseq, machine, packages
from mega_fairseq.cli.doctor.check import examine
from mega_fairseq.cli.doctor.command import CHECKS
from tests.commands import FORKS, LIMIT, ROOT

COMMAND = ["-m", "mega_fairseq.cli", "doctor"]
BARE = [sys.executable, "-S", *COMMAND]  # only with packages on PYTHONPATH
OF_FAIRSEQ = {"extensions", "plugin in fairseq", "checkpoints", "options"}
NEW = sys.version_info >= (3, 11)  # where fairseq is fairseq-fixed


class Report:
    """The parsed output of the command."""

    def __init__(self, code, out):
        self.code, self.out = code, out
        head, *lines, self.verdict = out.splitlines()
        columns = [head.index(title) for title in ("thing", "found", "remedy")]
        self.rows = dict(self.row(line, columns) for line in lines)
        noes = [f"{thing}: {remedy}" for thing, (mark, _, remedy) in self.rows.items() if mark == "no"]
        assert code == bool(noes), out
        said = f"cannot work here; begin with {noes[0]}; then" if noes else "work here; each note"
        assert self.verdict.startswith(f"Training and evaluation {said}")

    @staticmethod
    def row(line, columns):
        """Thing, and its mark, what was found and the remedy; each starts in its column and is not empty."""
        mark = line[: columns[0]].rstrip()
        assert mark in ("ok", "note", "no"), line
        if mark == "ok":  # may be longer than the column, as it has no remedy
            columns = columns[:2]
        parts = [line[start:end] for start, end in zip(columns, [*columns[1:], None])]
        for part, start in zip(parts, columns):
            assert line[start - 2 : start] == "  ", line
            assert part[:1].strip(), line
        thing, found, remedy = (part.rstrip() for part in [*parts, ""][:3])
        return thing, (mark, found, remedy)


def doctor(command, path=None, **environment):
    """Run the command in a new process with the packages under `path`; it must print nothing on stderr."""
    places = [str(place) for place in (path, ROOT) if place]
    result = subprocess.run(
        command,
        cwd=path or ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(places), **environment},
        capture_output=True,
        timeout=LIMIT,
    )
    assert result.stderr == b""
    return Report(result.returncode, result.stdout.decode())


def write_package(folder, name, source):
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(source, encoding="utf-8")


# ------------------------------------------------------------------------------ with everything installed


def _main(program, output):
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.chdir(ROOT)
    sys.argv = ["mega-fairseq", "doctor"]
    exec(program, {})
    from mega_fairseq.cli.main import main

    sys.exit(main(["doctor"]))


@pytest.fixture
def changed(tmp_path):
    """Run the command in a process that has imported fairseq and executed `program`."""

    def call(program=""):
        number, output = tempfile.mkstemp(dir=tmp_path)
        os.close(number)
        process = FORKS.Process(target=_main, args=(program, output))
        process.start()
        process.join(LIMIT)
        return Report(process.exitcode, Path(output).read_text())

    return call


def test_the_installed_packages_work(changed):
    report = changed()
    assert report.code == 0
    for thing in ("Python", "mega_fairseq", "torch", "numpy", "fairseq", "import fairseq", "bf16 on the CPU"):
        assert report.rows[thing][0] == "ok", report.out
    assert all(report.rows[thing][0] == "ok" for thing in OF_FAIRSEQ), report.out
    assert str(ROOT / "mega_fairseq") in report.rows["mega_fairseq"][1]
    assert torch.__version__ in report.rows["torch"][1]
    assert "legacy_ddp" in report.rows["several processes"][2]


def check_stock_checkpoints(report, allowed):
    mark, found, remedy = report.rows["stock checkpoints"]
    if allowed or tuple(map(int, torch.__version__.split(".")[:2])) < (2, 6):
        assert mark == "ok"
    else:
        assert (mark, "argparse.Namespace" in found, "--user-dir" in remedy) == ("note", True, True)
    assert report.rows["checkpoints"][0] == "ok"


@pytest.mark.slow
def test_the_command_reports_which_checkpoints_torch_reads():
    check_stock_checkpoints(doctor([sys.executable, *COMMAND]), allowed=False)


def test_torch_can_be_told_to_read_all_checkpoints(changed):
    program = "import os; os.environ['TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD'] = '1'"
    check_stock_checkpoints(changed(program), allowed=True)


def test_a_broken_requirement_is_a_no(changed):
    report = changed(
        "import sys, torch\n"
        "from fairseq import options\n"
        "sys.modules['fairseq.libbleu'] = None\n"
        "options.parse_args_and_arch = lambda *_: sys.exit('error: unknown option')\n"
        "torch.load = lambda *_, **__: {}['optimizer']"
    )
    for thing, found, remedy in (
        ("extensions", "halted", "pip uninstall -y fairseq"),
        ("checkpoints", "KeyError: 'optimizer'", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1"),
        ("options", "SystemExit: error: unknown option", "pip install"),
    ):
        row = report.rows[thing]
        assert (row[0], found in row[1], remedy in row[2]) == ("no", True, True), row


def test_a_plugin_that_is_not_registered_is_a_no(changed):
    report = changed("import mega_fairseq, fairseq.models as models; del models.MODEL_REGISTRY['mega_lm']")
    assert report.rows["plugin in fairseq"][:2] == ("no", "fairseq does not know the model mega_lm")
    assert not {"checkpoints", "options"} & set(report.rows)


def test_a_requirement_of_single_options_is_a_note(changed):
    report = changed(
        "import types, numpy, fairseq.logging.progress_bar as bar\n"
        "bar.SummaryWriter = None\n"
        "numpy.compat = types.SimpleNamespace(long=int)"
    )
    assert report.code == 0
    assert report.rows["TensorBoard"][0] == "note"
    assert "pip install tensorboardX" in report.rows["TensorBoard"][2]
    assert report.rows["fairseq with numpy"][0] == "ok"  # as with numpy 1


def test_checks_that_need_a_newer_torch_are_skipped(changed):
    report = changed("import torch; torch.__version__ = '2.3.1'")
    assert report.rows["torch"][:2] == ("no", "2.3.1, older than 2.4")
    assert report.rows["fairseq"][0] == "ok"
    assert not {"torch with numpy", "import fairseq", "GPU", "several processes", *OF_FAIRSEQ} & set(report.rows)


# ---------------------------------------------------------------------------------- with broken packages


BROKEN = [
    ("fastBPE", "raise AttributeError('no such thing')", "note", "AttributeError: no such thing"),
    ("matplotlib", f"raise RuntimeError('{'ä' * 500}')", "note", f"RuntimeError: {'ä' * 103}..."),
    ("numpy", "raise ImportError('\\n\\nIMPORTANT:  read\\tthis')", "no", "ImportError: IMPORTANT: read this"),
    ("omegaconf", "raise ValueError", "no", "ValueError"),
    ("sacrebleu", "raise SystemExit(3)", "no", "SystemExit: 3"),
    ("torch", "__version__ = '1.13.1+cu117'", "no", "1.13.1+cu117, older than 2.4"),
]


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("broken")
    for name, source, _, _ in BROKEN:
        write_package(folder, name, source)
    return folder


@pytest.fixture(scope="module")
def of_broken(broken):
    return doctor(BARE, broken)


@pytest.mark.parametrize(("name", "mark", "found"), [(name, mark, found) for name, _, mark, found in BROKEN])
def test_a_broken_package_is_reported_with_the_first_line_of_its_error(of_broken, name, mark, found):
    assert of_broken.rows[name][:2] == (mark, found)


def test_characters_that_the_terminal_lacks_are_escaped(broken):
    report = doctor(BARE, broken, PYTHONIOENCODING="ascii")
    assert "\\xe4\\xe4" in report.rows["matplotlib"][1]


def test_each_missing_package_is_reported_with_its_remedy(tmp_path):
    report = doctor(BARE, tmp_path)
    assert report.rows["fairseq"][:2] == ("no", "not installed")
    assert "fairseq-fixed==0.12.3.1" in report.rows["fairseq"][2] if NEW else "fairseq==0.12.2"
    assert {thing for thing, row in report.rows.items() if row[0] == "no"} == {
        *("torch", "numpy", "omegaconf", "hydra", "sacrebleu", "fairseq")
    }
    assert report.rows["fastBPE"][0] == report.rows["sentencepiece"][0] == "note"


@pytest.mark.parametrize(
    ("source", "mark", "found"),
    [
        ("fastBPE = object", "ok", "unknown version"),
        ("__version__ = '0.1.0'", "note", "0.1.0, without the class fastBPE"),
        (None, "note", "a folder of that name, not a package"),
    ],
)
def test_fastbpe_must_have_the_class_that_fairseq_uses(tmp_path, source, mark, found):
    if source is None:
        (tmp_path / "fastBPE").mkdir()
    else:
        write_package(tmp_path, "fastBPE", source)
    row = doctor(BARE, tmp_path).rows["fastBPE"]
    assert row[0] == mark
    assert found in row[1]


def test_another_package_named_torch_is_a_no(tmp_path):
    write_package(tmp_path, "torch", "__version__ = '2.13.0'")
    assert doctor(BARE, tmp_path).rows["torch"][:2] == (
        "no",
        "AttributeError: module 'torch' has no attribute 'version'",
    )


def test_output_of_imported_packages_is_suppressed(tmp_path):
    loud = "import logging, os, sys, warnings; print('loud'); print('loud', file=sys.stderr); os.write(1, b'loud\\n')\n"
    loud += "warnings.warn('loud'); logging.error('loud'); __version__ = '1.2.3'"
    write_package(tmp_path, "sacrebleu", loud)
    report = doctor(BARE, tmp_path, PYTHONUNBUFFERED="")  # so that printed text is buffered until the end
    assert report.rows["sacrebleu"][:2] == ("ok", "1.2.3")
    assert "loud" not in report.out


# ------------------------------------------------------------------------------------------ which fairseq


@pytest.mark.parametrize(
    ("installed", "files", "mark", "found", "remedy"),
    [
        (["fairseq-fixed 0.12.3.1"], True, "ok", "main branch", ""),
        (["fairseq 0.12.2"], True, "no" if NEW else "ok", "not run on Python 3.11" if NEW else "last official", ""),
        (["fairseq 0.12.2", "fairseq-fixed 0.12.3.1"], True, "no", "one overwrites the other", "uninstall"),
        (["fairseq-fixed 0.12.4"], True, "note", "0.12.4, not tested", "uninstall"),
        (["fairseq-fixed 0.12.3.1"], False, "no", "its files are missing", "uninstall"),
        ([], True, "note", "unknown version", "fairseq"),
        ([], False, "no", "not installed", "fairseq"),
    ],
)
def test_the_two_distributions_of_fairseq_are_distinguished(tmp_path, installed, files, mark, found, remedy):
    (tmp_path / "fairseq").mkdir()  # Python imports an empty folder too
    if files:
        (tmp_path / "fairseq" / "__init__.py").write_text("")
    for name, version in (words.split() for words in installed):
        metadata = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    row = doctor(BARE, tmp_path).rows["fairseq"]
    assert (row[0], found in row[1], remedy in row[2]) == (mark, True, True), row


# ------------------------------------------------------------------------------------------------ remedies


def test_remedies_install_the_required_versions():
    setup, install = ((ROOT / name).read_text() for name in ("setup.py", "docs/install.md"))
    assert f'"torch>={".".join(map(str, packages.OLDEST_TORCH))}"' in setup
    for pair in (fairseq.OFFICIAL, fairseq.FIXED):
        assert f"'{'=='.join(pair)};" in setup
    assert "==".join(fairseq.FIXED if NEW else fairseq.OFFICIAL) in fairseq.GET_FAIRSEQ
    for command in packages.GET_FASTBPE.split(": ")[1].split(", then "):
        assert f"\n{command}\n" in install


def test_every_check_has_a_remedy_and_follows_the_checks_that_it_needs():
    things = []
    for check in CHECKS:
        assert check.remedy
        assert set(check.after) <= set(things)
        things.append(check.thing)


# ------------------------------------------------------------------------------------------ other machines


def row(thing):
    """The result of one check in this process."""
    return examine([check for check in CHECKS if check.thing == thing])[0]


def test_supported_pythons_are_3_8_to_3_13(monkeypatch):
    version = SimpleNamespace(version_info=(3, 13, 1))
    monkeypatch.setattr(packages, "sys", version)
    assert row("Python").mark == "ok"
    version.version_info = (3, 14, 0)
    assert row("Python")[::3] == ("note", "use Python 3.13 if something fails")
    version.version_info = (3, 7, 9)
    assert row("Python").mark == "no"


def test_the_compiler_is_the_one_that_a_build_uses(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    assert row("C++ compiler")[::2] == ("note", "none called no-such-compiler")
    compiler, header = tmp_path / "compiler", tmp_path / "Python.h"
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(packages.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    compiler.write_text("#!/bin/sh\necho any 1.0\n")
    compiler.chmod(0o755)
    assert row("C++ compiler")[::2] == ("note", "any 1.0, without Python.h")
    header.touch()
    assert row("C++ compiler")[::2] == ("ok", "any 1.0")
    compiler.write_text("#!/bin/sh\necho broken; exit 1\n")
    assert row("C++ compiler")[::2] == ("note", f"{compiler} fails: broken")


@pytest.fixture
def two_gpus(monkeypatch):
    """Two listed GPUs, which compute on the CPU."""
    properties = SimpleNamespace(name="Tesla T4", total_memory=15 << 30)
    monkeypatch.setattr(torch.version, "cuda", "12.4")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    monkeypatch.setattr(machine, "gpus", lambda: ["cpu", "cpu"])


def test_gpus_are_counted_and_their_number_formats_checked(two_gpus, monkeypatch):
    assert row("GPU")[::2] == ("ok", "2 x Tesla T4 with 15 GiB, CUDA 12.4")
    assert row("fp16 on the GPU").mark == "ok"
    assert row("bf16 on the GPU")[::2] == ("note", "emulated and slow on compute capability 7.5")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert row("bf16 on the GPU").mark == "ok"


def test_a_gpu_that_cannot_compute_is_a_note(two_gpus, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("CUDA error: no kernel image is available\nand more")

    monkeypatch.setattr(torch, "ones", fail)
    things = {found.thing: found for found in examine(machine.CHECKS)}
    assert things["GPU"][::2] == ("note", "RuntimeError: CUDA error: no kernel image is available")
    assert not [thing for thing in things if thing.endswith("on the GPU")]
    assert things["bf16 on the CPU"].mark == "note"


def test_the_reason_for_no_gpu_is_reported(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(machine, "DRIVER", str(tmp_path / "none"))
    assert row("GPU").found == "none, and torch is built for CPUs"
    monkeypatch.setattr(machine, "DRIVER", str(tmp_path))
    assert "built for CUDA" in row("GPU").remedy
    monkeypatch.setattr(torch.version, "cuda", "12.4")
    monkeypatch.setattr(torch.cuda, "init", lambda: (_ for _ in ()).throw(RuntimeError("the driver is too old")))
    assert row("GPU").found == "none that torch can use: RuntimeError: the driver is too old"


def test_a_format_with_wrong_results_is_a_note(monkeypatch):
    ones = torch.ones
    monkeypatch.setattr(torch, "ones", lambda *sizes, **how: ones(*sizes, **how).mul(2).detach().requires_grad_())
    assert row("bf16 on the CPU")[::2] == ("note", "wrong results in bfloat16 on cpu")


@pytest.mark.parametrize(
    ("threads", "setting", "cpus", "quota", "load", "mark"),
    [
        (4, "4", 4, "max 100000", 0.1, "ok"),
        (4, None, 4, "max 100000", 0.1, "note"),  # a second process would take the same CPUs
        (2, "2", 2, "max 100000", 2.0, "note"),  # another process has taken them
        (1, "1", 2, "max 100000", 2.0, "ok"),
        (1, None, 1, "max 100000", 0.1, "ok"),
        (4, "4", 2, "max 100000", 0.0, "note"),
        (4, "4", 4, "150000 100000", 0.0, "note"),  # a container with 1.5 CPUs
    ],
)
def test_threads_are_compared_with_free_cpus(monkeypatch, tmp_path, threads, setting, cpus, quota, load, mark):
    (tmp_path / "cpu.max").write_text(f"{quota}\n")
    monkeypatch.setattr(machine, "CPU_LIMIT", str(tmp_path / "cpu.max"))
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cpus)), raising=False)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    if setting is None:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    else:
        monkeypatch.setenv("OMP_NUM_THREADS", setting)
    found = row("threads")
    assert found.mark == mark
    assert f"torch uses {threads} per process on {2 if quota[0] == '1' else cpus} CPUs" in found.found
    assert mark == "ok" or "export OMP_NUM_THREADS=1" in found.remedy


def test_little_memory_of_machine_or_container_is_a_note(monkeypatch, tmp_path):
    limit, free = tmp_path / "limit", tmp_path / "free"
    monkeypatch.setattr(machine, "MEMORY_LIMITS", (str(tmp_path / "none"), str(limit)))
    monkeypatch.setattr(machine, "MEMORY", str(free))
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 8 << 18}.get, raising=False)
    for said, available, mark, found in (
        ("max", 3, "ok", "3.0 of 8.0 GiB free"),
        ("max", 1, "note", "1.0 of 8.0 GiB free"),
        (str(4 << 30), 6, "ok", "4.0 of 4.0 GiB free"),
    ):
        limit.write_text(f"{said}\n")
        free.write_text(f"MemTotal: 1 kB\nMemAvailable:   {available << 20} kB\n")
        assert row("memory")[::2] == (mark, found)
    free.unlink()
    assert row("memory")[::2] == ("ok", "4.0 GiB")


def test_a_torch_without_process_groups_is_a_note(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    assert row("several processes")[::2] == ("note", "this torch is built without torch.distributed")
