"""`mega-fairseq doctor`: with everything installed, with nothing installed, and with broken packages."""

import os
import re
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from mega_fairseq.cli.doctor import machine, packages
from mega_fairseq.cli.doctor.command import examine
from mega_fairseq.ops import backend as kernels
from tests.helpers.commands import LIMIT, ROOT, Running

BARE = [sys.executable, "-S", "-m", "mega_fairseq.cli", "doctor"]  # with no packages except those on PYTHONPATH
CHECKS = [*packages.CHECKS, *machine.CHECKS]
NEEDED = {"numpy", "torch", "omegaconf", "hydra", "sacrebleu", "fairseq"}


class Report:
    """The parsed output of the command: mark and text by check."""

    def __init__(self, code, out):
        self.code, self.out = code, out
        *lines, verdict = out.splitlines()
        found = [re.fullmatch(r"(ok|note|no) +(\S.{12})  (\S.*)", line) for line in lines]
        assert all(found), out
        self.rows = {line[2].rstrip(): (line[1], line[3]) for line in found}
        noes = [thing for thing, (mark, _) in self.rows.items() if mark == "no"]
        assert code == bool(noes), out
        said = f"cannot work here; begin with {noes[0]}: " if noes else "work here; each note"
        assert verdict.startswith(f"Training and evaluation {said}")


def doctor(path, **environment):
    """Runs the command in a new process with only the packages under `path`; it must print nothing on stderr."""
    places = os.pathsep.join([str(path), str(ROOT)])
    result = subprocess.run(
        BARE, cwd=path, env={**os.environ, "PYTHONPATH": places, **environment}, capture_output=True, timeout=LIMIT
    )
    assert result.stderr == b""
    return Report(result.returncode, result.stdout.decode())


def write_package(folder, name, source):
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(source, encoding="utf-8")


# ------------------------------------------------------------------------------ with everything installed


def changed(program=""):
    """The report of the command in a process that has imported fairseq and executed `program`."""
    return Report(*Running("mega-fairseq", "doctor", fault=partial(exec, program, {})).wait())


def test_the_installed_packages_train_a_model():
    report = changed()
    assert report.code == 0
    for thing in ("Python", "mega_fairseq", "training", *NEEDED):
        assert report.rows[thing][0] == "ok", report.out
    assert str(ROOT / "mega_fairseq") in report.rows["mega_fairseq"][1]
    assert torch.__version__ in report.rows["torch"][1]


@pytest.mark.parametrize(
    ("program", "found"),
    [
        ("import torch; torch.load = lambda *_, **__: {}['optimizer']", "KeyError: 'optimizer'"),
        ("from fairseq import options as o; o.parse_args_and_arch = lambda *_: exit('unknown')", "SystemExit: unknown"),
        ("import sys, fairseq; sys.modules['fairseq.data.data_utils_fast'] = None", "build Cython components"),
    ],
)
def test_a_training_that_fails_is_reported_as_a_no(program, found):
    mark, said = changed(program).rows["training"]
    assert (mark, found in said, "; pip uninstall -y fairseq" in said) == ("no", True, True), said


def test_a_full_disk_is_not_reported_as_an_error_of_fairseq():
    program = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))"
    mark, said = changed(program).rows["training"]
    assert (mark, "cannot hold a file of 32 MiB" in said, "set TMPDIR" in said) == ("no", True, True), said


# ---------------------------------------------------------------------------------- with broken packages


BROKEN = [
    ("fastBPE", "raise AttributeError('no such thing')", "note", "AttributeError: no such thing; "),
    ("matplotlib", f"raise RuntimeError('{'ä' * 500}')", "note", f"RuntimeError: {'ä' * 103}...; "),
    ("numpy", "raise ImportError('\\n\\nIMPORTANT:  read\\tthis')", "no", "ImportError: IMPORTANT: read this; "),
    ("omegaconf", "raise ValueError", "no", "ValueError; "),
    ("sacrebleu", "raise SystemExit(3)", "no", "SystemExit: 3; "),
    ("torch", "__version__ = '1.13.1+cu117'", "no", "1.13.1+cu117, older than 2.4; "),
]


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("broken")
    for name, source, _, _ in BROKEN:
        write_package(folder, name, source)
    return folder


@pytest.mark.parametrize(("encoding", "letter"), [("utf-8", "ä"), ("ascii", "\\xe4")])
def test_broken_packages_are_reported_with_the_first_lines_of_their_errors(broken, encoding, letter):
    report = doctor(broken, PYTHONIOENCODING=encoding)
    for name, _, mark, found in BROKEN:
        assert report.rows[name][0] == mark
        assert report.rows[name][1].startswith(found.replace("ä", letter)), report.out
    assert "training" not in report.rows


def test_each_missing_package_is_reported_with_its_remedy(tmp_path):
    (tmp_path / "fastBPE").mkdir()  # Python imports an empty folder too
    report = doctor(tmp_path)
    assert {thing for thing, row in report.rows.items() if row[0] == "no"} == NEEDED
    assert all("pip install" in report.rows[thing][1] for thing in NEEDED)
    for thing in ("fastBPE", "sentencepiece", "matplotlib", "TensorBoard"):
        assert report.rows[thing][0] == "note"


def test_output_of_imported_packages_is_suppressed(tmp_path):
    loud = "import logging, os, sys, warnings; print('loud'); print('loud', file=sys.stderr); os.write(1, b'loud\\n')\n"
    loud += "warnings.warn('loud'); logging.error('loud'); __version__ = '1.2.3'"
    write_package(tmp_path, "sacrebleu", loud)
    report = doctor(tmp_path, PYTHONUNBUFFERED="")  # so that printed text is buffered until the end
    assert report.rows["sacrebleu"] == ("ok", "1.2.3")
    assert "loud" not in report.out


OLD = "no" if packages.NEW else "ok"


@pytest.mark.parametrize(
    ("installed", "files", "mark", "found"),
    [
        (["fairseq-fixed 0.12.3.1"], True, "ok", "fairseq-fixed 0.12.3.1"),
        (["fairseq 0.12.2"], True, OLD, "does not run on Python 3.11" if packages.NEW else "fairseq 0.12.2"),
        (["fairseq 0.12.2", "fairseq-fixed 0.12.3.1"], True, "no", "which overwrite each other; pip uninstall"),
        (["fairseq-fixed 0.12.4"], True, "note", "0.12.4, not tested; pip uninstall"),
        ([], True, "note", "unknown version"),
        ([], False, "no", "not installed"),
    ],
)
def test_the_two_distributions_of_fairseq_are_distinguished(tmp_path, monkeypatch, installed, files, mark, found):
    (tmp_path / "fairseq").mkdir()
    if files:
        (tmp_path / "fairseq" / "__init__.py").write_text("")
    for name, version in (words.split() for words in installed):
        metadata = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "fairseq", raising=False)
    result = row("fairseq")
    assert result.mark == mark
    assert found in f"{result.found}; {result.remedy}"


@pytest.mark.parametrize("hiding", [True, False])
def test_a_folder_that_hides_the_installed_fairseq_is_named(tmp_path, monkeypatch, hiding):
    installed, other = tmp_path / "installed", tmp_path / "other"
    for place in (installed, *[other] * hiding):
        place.mkdir()
        write_package(place, "fairseq", "")
    (installed / "fairseq_fixed-0.12.3.1.dist-info").mkdir()
    name = "Metadata-Version: 2.1\nName: fairseq-fixed\nVersion: 0.12.3.1\n"
    (installed / "fairseq_fixed-0.12.3.1.dist-info/METADATA").write_text(name)
    monkeypatch.setattr(sys, "path", [str(other), str(installed)])
    monkeypatch.delitem(sys.modules, "fairseq", raising=False)
    result = row("fairseq")
    assert result.mark == ("note" if hiding else "ok")
    if hiding:
        assert result.found.startswith("fairseq-fixed 0.12.3.1, hidden by /")
        assert f"remove {other} from PYTHONPATH" in result.remedy


def test_remedies_install_the_required_versions():
    setup, install = ((ROOT / name).read_text() for name in ("setup.py", "docs/install.md"))
    assert '"torch>=2.4"' in setup
    for pair in (packages.OFFICIAL, packages.FIXED):
        assert f"'{'=='.join(pair)};" in setup
    assert "==".join(packages.FIXED if packages.NEW else packages.OFFICIAL) in packages.REBUILD
    for command in packages.GET_FASTBPE.split(": ")[1].split(", then "):
        assert f"\n{command}\n" in install


# ------------------------------------------------------------------------------------------ other machines


def row(name):
    """The result of one check in this process."""
    return examine([check for check in CHECKS if check.name == name])[0]


def test_supported_pythons_are_3_8_to_3_13(monkeypatch):
    version = SimpleNamespace(version_info=(3, 13, 1))
    monkeypatch.setattr(packages, "sys", version)
    assert row("Python").mark == "ok"
    for other in ((3, 14, 0), (3, 7, 9)):
        version.version_info = other
        assert row("Python")[::3] == ("note", "use Python 3.13 if something fails")


def test_the_compiler_is_the_one_that_a_build_uses(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    assert row("C++ compiler")[::2] == ("note", "none called no-such-compiler")
    compiler, header = tmp_path / "compiler", tmp_path / "Python.h"
    compiler.touch(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(packages.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    assert row("C++ compiler")[::2] == ("note", f"{compiler}, without Python.h")
    header.touch()
    assert row("C++ compiler")[::2] == ("ok", str(compiler))


def test_a_torch_that_was_built_for_another_numpy_is_reported_as_a_no(monkeypatch):
    def fail(tensor):
        raise RuntimeError("Numpy is not available")

    monkeypatch.setattr(torch.Tensor, "numpy", fail)
    found = row("torch")
    assert (found.mark, "Numpy is not available" in found.found) == ("no", True)
    assert found.remedy == "pip install 'numpy<2'"


@pytest.mark.parametrize(
    ("faster", "mark", "said"),
    [(2.4, "ok", "2.4 times as fast"), (1.0, "note", "1.0 times as fast"), (0.02, "note", "50.0 times as long")],
)
def test_bf16_is_recommended_where_the_cpu_multiplies_it_faster(monkeypatch, faster, mark, said):
    monkeypatch.setattr(machine, "product_seconds", {"float32": faster, "bfloat16": 1.0}.get)
    found = row("bf16")
    assert found.mark == mark
    assert said in found.found
    assert ("--bf16 makes training on it faster" in found.found) == (mark == "ok")
    assert found.remedy == ("" if mark == "ok" else "on the CPU, train in float32")


@pytest.fixture
def two_gpus(monkeypatch):
    """Two fake GPUs, which compute on the CPU."""
    properties = SimpleNamespace(name="Tesla T4", total_memory=15 << 30)
    monkeypatch.setattr(torch.version, "cuda", "12.4")
    monkeypatch.setattr(torch, "device", lambda *_: "cpu")
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    monkeypatch.setattr(kernels, "why_no_kernels", lambda _: None)


def test_gpus_are_counted_and_their_number_formats_checked(two_gpus, monkeypatch):
    assert row("GPU")[1:] == (
        *("GPU", "2 x Tesla T4 with 15 GiB; bf16 is emulated on compute capability 7.5"),
        "give --fp16, not --bf16",
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert row("GPU")[::2] == ("ok", "2 x Tesla T4 with 15 GiB")


def test_a_gpu_without_triton_is_reported_with_a_remedy(two_gpus, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(kernels, "why_no_kernels", lambda _: "RuntimeError: Failed to find C compiler")
    _, _, found, remedy = row("GPU")
    assert "; Mega's layers are slower, since Triton's kernels do not run: RuntimeError: Failed to find C" in found
    assert remedy.startswith("install a C compiler")


def test_a_gpu_that_cannot_compute_is_reported_as_a_note(two_gpus, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("CUDA error: no kernel image is available\nand more")

    monkeypatch.setattr(torch, "ones", fail)
    assert row("GPU")[::2] == ("note", "RuntimeError: CUDA error: no kernel image is available")


def test_the_reason_for_no_gpu_is_reported(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(machine, "DRIVER", str(tmp_path))
    assert row("GPU").remedy == "install a torch built for CUDA"
    monkeypatch.setattr(machine, "DRIVER", str(tmp_path / "none"))
    assert row("GPU")[::2] == ("note", "none found: torch is built for CPUs")
    monkeypatch.setattr(torch.version, "cuda", "12.4")
    monkeypatch.setattr(torch.cuda, "init", lambda: (_ for _ in ()).throw(RuntimeError("the driver is too old")))
    assert row("GPU")[::2] == ("note", "RuntimeError: the driver is too old")


@pytest.mark.parametrize(
    ("threads", "setting", "cpus", "quota", "load", "mark"),
    [
        (4, "4", 4, "max 100000", 0.1, "ok"),
        (4, None, 4, "max 100000", 0.1, "note"),  # a second process would take the same CPUs
        (2, "2", 2, "max 100000", 2.0, "note"),  # another process uses them
        (1, None, 2, "max 100000", 2.0, "ok"),
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
