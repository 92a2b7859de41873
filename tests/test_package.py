"""The package as a whole: what importing it loads, imports between layers, packaging files."""

import ast
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import mega_fairseq

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "mega_fairseq"
DISTRIBUTION = "mega-fairseq"
SOURCES = sorted(PACKAGE.rglob("*.py"))
MAX_LINES = 450

# The packages that the files of a layer may import, besides the standard library.
LAYERS = {
    "ops": ("torch", "triton", "mega_fairseq.ops"),
    "modules": ("torch", "mega_fairseq.ops", "mega_fairseq.modules"),
}

# Hosts of package registries and folders of one machine, spelled so that the pattern does not match itself.
PRIVATE = re.compile(
    rb"pyp[i]\.org|python[h]osted\.org|npm[j]s\.(org|com)|deb\.debia[n]\.org"
    rb"|(^|[^A-Za-z0-9_.])/(w[o]rk|f[a]rm|h[o]me|r[o]ot)/"
)


def relative(path):
    return str(path.relative_to(ROOT))


def imported_names(source, package):
    """Absolute names of everything that a file of `package` imports, inside functions too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: package.count(".") + 2 - node.level] if node.level else []
            origin = [*above, node.module] if node.module else above
            yield from (".".join([*origin, alias.name]) for alias in node.names)


def upward_imports(source, layer):
    """The imports that a file of this layer must not contain."""
    return [
        name
        for name in imported_names(source, f"mega_fairseq.{layer}")
        if name.split(".")[0] not in sys.stdlib_module_names
        and not any(name == allowed or name.startswith(allowed + ".") for allowed in LAYERS[layer])
    ]


def requirements(lines):
    return [Requirement(line) for line in lines if line.strip() and not line.startswith("#")]


def constraints():
    return requirements((ROOT / "constraints.txt").read_text().splitlines())


@pytest.mark.parametrize("module", ["mega_fairseq", "mega_fairseq.ops", "mega_fairseq.modules"])
def test_importing_the_lower_layers_does_not_import_fairseq(module):
    program = f"import sys, {module}; sys.exit('fairseq' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT).returncode == 0


def test_importing_models_does_not_import_triton_kernels_since_triton_may_be_missing():
    program = "import sys, mega_fairseq.models; sys.exit(any(name.endswith('.triton') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT).returncode == 0


@pytest.mark.skipif(sys.version_info < (3, 10), reason="sys.stdlib_module_names came with Python 3.10")
@pytest.mark.parametrize("layer", LAYERS)
def test_layers_only_import_lower_layers(layer):
    files = sorted((PACKAGE / layer).rglob("*.py"))
    assert files
    found = {relative(path): upward_imports(path.read_text(), layer) for path in files}
    assert not {path: names for path, names in found.items() if names}


@pytest.mark.skipif(sys.version_info < (3, 10), reason="sys.stdlib_module_names came with Python 3.10")
@pytest.mark.parametrize(
    ("layer", "source"),
    [
        ("ops", "from mega_fairseq.modules import DampedEMA"),
        ("ops", "from ..modules import DampedEMA"),
        ("ops", "from .. import __version__"),
        ("modules", "def late():\n    import fairseq.utils"),
        ("modules", "import torchaudio"),
    ],
)
def test_an_import_of_a_higher_layer_is_detected(layer, source):
    assert upward_imports(source, layer)


def test_every_folder_with_code_is_a_package():
    assert all((path.parent / "__init__.py").exists() for path in SOURCES)


def test_a_module_name_occurs_in_one_folder_of_the_package():
    folders = {}
    for path in PACKAGE.glob("*/**/*.py"):
        if path.stem != "__init__":
            folders.setdefault(path.stem, set()).add(path.relative_to(PACKAGE).parts[0])
    assert {name: found for name, found in folders.items() if len(found) > 1} == {}


def test_no_test_file_imports_another():
    found = {
        relative(path): [name for name in imported_names(path.read_text(), "tests") if ".test_" in name]
        for path in (ROOT / "tests").rglob("test_*.py")
    }
    assert not {path: names for path, names in found.items() if names}


def test_no_file_is_longer_than_450_lines():
    lengths = {relative(path): len(path.read_text().splitlines()) for path in SOURCES}
    assert not {path: lines for path, lines in lengths.items() if lines > MAX_LINES}


def test_installed_metadata_has_the_version_of_the_package():
    assert importlib.metadata.version(DISTRIBUTION) == mega_fairseq.__version__


def test_the_changelog_has_the_version():
    assert f"## [{mega_fairseq.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_every_constraint_has_a_version():
    assert all(constraint.specifier for constraint in constraints())


@pytest.mark.skipif(sys.version_info < (3, 11), reason="older Pythons have ranges, not pins")
@pytest.mark.parametrize("extra", ["", "dev", "plot", "test"])
def test_every_declared_dependency_is_pinned_to_a_version_that_it_accepts(extra):
    pins = {
        canonicalize_name(constraint.name): next(iter(constraint.specifier)).version
        for constraint in constraints()
        if constraint.marker.evaluate()
    }
    declared = requirements(importlib.metadata.requires(DISTRIBUTION))
    wanted = [r for r in declared if r.marker is None or r.marker.evaluate({"extra": extra})]
    assert not [str(r) for r in wanted if not r.specifier.contains(pins.get(canonicalize_name(r.name), "0"))]


@pytest.mark.parametrize("builds", [True, False])
def test_installing_continues_with_a_message_if_fastbpe_does_not_build(builds, tmp_path):
    """Uses the Makefile with a fake pip that installs nothing and may fail to build fastBPE."""
    for name in ("Makefile", "setup.py", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    pip = tmp_path / "pip"
    pip.write_text(f"#!/bin/sh\necho longintrepr.h\ncase $* in *fastBPE*) {str(builds).lower()} ;; esac\n")
    pip.chmod(0o755)
    (tmp_path / "venv/bin").mkdir(parents=True)
    (tmp_path / "venv/bin/python").symlink_to(sys.executable)
    words = ["make", "install", "PYTHON=true", "CXX=true", "VENV=venv", f"PIP={pip}"]
    environment = {name: value for name, value in os.environ.items() if name != "MAKEFLAGS"}
    result = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    sentence = "fastBPE does not build here: BPE=fastbpe and --bpe fastbpe are not available; see venv/fastBPE.log\n"
    assert result.stderr == ("" if builds else sentence)
    assert (tmp_path / "venv/fastBPE.log").read_text() == "longintrepr.h\n"
    assert (tmp_path / "venv/.ready").exists()


def test_no_file_contains_a_package_registry_or_a_folder_of_one_machine():
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True
    )
    if listing.returncode:
        pytest.skip("not a git checkout")
    files = [ROOT / name for name in listing.stdout.decode().split("\0") if name]
    found = [relative(path) for path in files if path.is_file() and PRIVATE.search(path.read_bytes())]
    assert not found
