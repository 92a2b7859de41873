"""`mega-fairseq doctor`: with everything installed, with nothing installed, and with broken packages."""

import os
import re
import subprocess
import sys
from functools import partial

import pytest
import torch

from mega_fairseq.cli import cpu, doctor
from tests.helpers.commands import LIMIT, ROOT, Running

BARE = [sys.executable, "-S", "-m", "mega_fairseq.cli", "doctor"]  # with no packages except those on PYTHONPATH
NEEDS_GLIBC = pytest.mark.skipif(not cpu.GLIBC, reason="only glibc has the settings")
NEEDED = {"Python", "mega_fairseq", "fairseq", "torch", "sacrebleu", "training"}


def parse(code, output):
    """Mark and text by check."""
    *lines, verdict = output.splitlines()
    matches = [re.fullmatch(r"(ok|note|no) +(\S.{12})  (\S.*)", line) for line in lines]
    assert all(matches), output
    rows = {match[2].rstrip(): (match[1], match[3]) for match in matches}
    broken = [name for name, (mark, _) in rows.items() if mark == "no"]
    assert code == bool(broken), output
    assert (f"begin with {broken[0]}" if broken else "work here") in verdict
    return rows


def bare(path, **environment):
    """Runs the command in a new process with only the packages under `path`; it must print nothing on stderr."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(path), str(ROOT)]), **environment}
    result = subprocess.run(BARE, cwd=path, env=environment, capture_output=True, timeout=LIMIT)
    assert result.stderr == b""
    return parse(result.returncode, result.stdout.decode())


def changed(program=""):
    """The rows of the command in a process that has imported fairseq and executed `program`."""
    return parse(*Running("mega-fairseq", "doctor", fault=partial(exec, program, {})).wait())


def row(name):
    """Mark and text of one check in this process."""
    ((mark, _, text),) = doctor.examine([check for check in doctor.CHECKS if check[0] == name])
    return mark, text


def write_package(folder, name, source):
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(source, encoding="utf-8")


def write_metadata(folder, name, version):
    place = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    place.mkdir()
    (place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


@pytest.mark.slow
def test_the_installed_packages_train_a_model():
    rows = changed()
    assert {name for name, *_ in doctor.CHECKS} == rows.keys()
    assert {name for name, (mark, _) in rows.items() if mark == "ok"} >= NEEDED
    assert str(ROOT / "mega_fairseq") in rows["mega_fairseq"][1]
    assert torch.__version__ in rows["torch"][1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "text"),
    [
        ("import torch; torch.load = lambda *_, **__: {}['optimizer']", "KeyError: 'optimizer'"),
        ("import sys, fairseq; sys.modules['fairseq.data.data_utils_fast'] = None", "build Cython components"),
    ],
)
def test_a_training_that_fails_is_a_no(program, text):
    mark, said = changed(program)["training"]
    assert mark == "no"
    assert text in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("torch", "text"),
    [
        (None, "ModuleNotFoundError: "),
        ("__version__ = '1.13.1+cu117'", "1.13.1+cu117 is older than 2.4; pip install "),
        (
            "raise ImportError('\\n\\nIMPORTANT:  read\\tthis ä')",
            "ImportError: IMPORTANT: read this \\xe4; pip install ",
        ),
        ("import os; print('loud'); os.write(1, b'loud'); raise SystemExit(3)", "SystemExit: 3; pip install "),
    ],
)
def test_a_broken_or_missing_package_ends_the_checks_with_a_remedy(torch, text, tmp_path):
    write_package(tmp_path, "fairseq", "")
    if torch is not None:
        write_package(tmp_path, "torch", torch)
    *others, last = bare(tmp_path, PYTHONIOENCODING="ascii", PYTHONUNBUFFERED="").items()
    assert [mark for _, (mark, _) in others] == ["ok", "ok", "note"]
    assert last[0] == "torch"
    assert text in last[1][1]


def test_a_reason_of_usual_length_is_not_cut():
    reason = (
        "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and installed a driver from "
        "http://www.nvidia.com/Download/index.aspx"
    )

    def look():
        raise RuntimeError(reason)

    ((_, _, text),) = doctor.examine([("GPU", False, look, "train small models on the CPU")])
    assert text == f"RuntimeError: {reason}; train small models on the CPU"


OLD = "no" if doctor.NEW else "ok"


@pytest.mark.parametrize(
    ("installed", "files", "mark", "text"),
    [
        (["fairseq-fixed 0.12.3.1"], True, "ok", "fairseq-fixed 0.12.3.1"),
        (["fairseq 0.12.2"], True, OLD, "fairseq 0.12.2"),
        (["fairseq 0.12.2", "fairseq-fixed 0.12.3.1"], True, "no", "overwrite each other"),
        (["fairseq-fixed 0.12.4"], True, "note", "0.12.4, not tested"),
        ([], True, "note", "unknown version"),
        ([], False, "no", "not installed"),
    ],
)
def test_the_two_distributions_of_fairseq_are_distinguished(tmp_path, monkeypatch, installed, files, mark, text):
    if files:
        write_package(tmp_path, "fairseq", "")
    for words in installed:
        write_metadata(tmp_path, *words.split())
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "fairseq", raising=False)
    found, said = row("fairseq")
    assert found == mark
    assert text in said


def test_the_tested_versions_of_fairseq_are_the_required_ones():
    setup = (ROOT / "setup.py").read_text()
    for pair in doctor.TESTED.items():
        assert f"'{'=='.join(pair)};" in setup


@pytest.mark.parametrize(("faster", "mark"), [(2.4, "ok"), (1.0, "note"), (0.02, "note")])
def test_bf16_is_recommended_where_the_cpu_multiplies_it_faster(monkeypatch, faster, mark):
    monkeypatch.setattr(cpu, "product_seconds", {"float32": faster, "bfloat16": 1.0}.get)
    found, said = row("bf16")
    assert found == mark
    assert f"{faster:.2f} times" in said


@pytest.fixture
def gaining(monkeypatch):
    """What doctor says of memory where training gains this factor, with the settings or without."""

    def look(factor, settings):
        for name in cpu.KEEP_MEMORY:
            monkeypatch.delenv(name, raising=False)
        for name, value in settings.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(cpu, "update_seconds", lambda **settings: 1.0 if settings else factor)
        return row("memory")

    return look


@NEEDS_GLIBC
@pytest.mark.parametrize(("factor", "mark"), [(1.8, "note"), (1.0, "ok")])
def test_settings_of_the_memory_are_recommended_where_training_gains(gaining, factor, mark):
    found, said = gaining(factor, {})
    assert found == mark
    assert f"{factor:.2f} times" in said
    assert [f"{name}={value}" in said for name, value in cpu.KEEP_MEMORY.items()] == [mark == "note"] * 2
    assert gaining(factor, cpu.KEEP_MEMORY)[0] == "ok"


@NEEDS_GLIBC
def test_a_step_is_timed_with_the_settings_and_without(monkeypatch):
    """Without them, a process has returned its large tensors to the kernel after the last step."""
    pages = "print(open('/proc/self/statm').read().split()[1])"
    monkeypatch.setattr(cpu, "UPDATE", cpu.UPDATE.rpartition("print")[0] + "update()\n" + pages)
    for name, value in cpu.KEEP_MEMORY.items():
        monkeypatch.setenv(name, value)  # `update_seconds` does not take them from the environment
    kept, returned = cpu.update_seconds(**cpu.KEEP_MEMORY), cpu.update_seconds()
    assert kept - returned > 4096 * 4000 * 4 / os.sysconf("SC_PAGE_SIZE")
