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
from tests.helpers.commands import fresh
from tests.helpers.forking import write_script

ROOT = Path(__file__).resolve().parent.parent
DISTRIBUTION = "mega-fairseq"
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


# ------------------------------------------------------------------------------------------------ layers


def imports(source, package):
    """Absolute names of all that a file of `package` imports, also inside functions and with importlib."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: package.count(".") + 2 - node.level] if node.level else []
            origin = [*above, node.module] if node.module else above
            yield from (".".join([*origin, alias.name]) for alias in node.names)
        elif isinstance(node, ast.Constant) and str(node.value).startswith("mega_fairseq."):
            yield node.value


def upward_imports(source, layer):
    """The imports that a file of this layer must not contain."""
    return [
        name
        for name in imports(source, f"mega_fairseq.{layer}")
        if name.split(".")[0] not in sys.stdlib_module_names
        and not any(name == allowed or name.startswith(allowed + ".") for allowed in LAYERS[layer])
    ]


def circles(modules):
    """The modules that are, or depend on, part of an import circle. `modules`: name -> (source, package)."""
    left = {}
    for name, (source, package) in modules.items():
        names = imports(source, package)
        left[name] = {n if n in modules else n.rpartition(".")[0] for n in names} & set(modules) - {name}
    while True:
        free = [name for name, needed in left.items() if not needed & set(left)]
        if not free:
            return left
        for name in free:
            del left[name]


@pytest.mark.slow
def test_lower_layers_do_not_import_fairseq_and_none_needs_triton():
    program = (
        "import sys; sys.modules['triton'] = None; import mega_fairseq.modules; assert 'fairseq' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", f"{program}; import mega_fairseq.models"], cwd=ROOT, check=True)


@pytest.mark.slow
def test_without_triton_only_tests_of_its_kernels_are_skipped():
    program = "import sys; sys.modules['triton'] = None; import pytest; sys.exit(pytest.main(sys.argv[1:]))"
    words = ["--collect-only", "-q", "-p", "no:cacheprovider", "tests/ops", "tests/modules"]
    done = subprocess.run([sys.executable, "-c", program, *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    skipped = re.findall(r"^SKIPPED .* tests/(.*): Triton is not installed$", done.stdout, re.MULTILINE)
    assert sorted(skipped) == ["modules/test_launches.py", "ops/test_triton.py"]


@pytest.mark.skipif(sys.version_info < (3, 10), reason="sys.stdlib_module_names came with Python 3.10")
@pytest.mark.parametrize("layer", LAYERS)
def test_layers_only_import_lower_layers(layer):
    files = sorted((ROOT / "mega_fairseq" / layer).rglob("*.py"))
    assert files
    upward = {str(path): upward_imports(path.read_text(), layer) for path in files}
    assert not {path: names for path, names in upward.items() if names}


@pytest.mark.skipif(sys.version_info < (3, 10), reason="sys.stdlib_module_names came with Python 3.10")
@pytest.mark.parametrize(
    ("layer", "source"),
    [
        ("ops", "from mega_fairseq.modules import DampedEMA"),
        ("ops", "from ..modules import DampedEMA"),
        ("modules", "def late():\n    import fairseq.utils"),
    ],
)
def test_an_upward_import_is_detected(layer, source):
    assert upward_imports(source, layer)


def test_modules_do_not_import_each_other_in_circles():
    modules = {}
    for path in ROOT.glob("mega_fairseq/**/*.py"):
        package = ".".join(path.parent.relative_to(ROOT).parts)
        modules[package if path.stem == "__init__" else f"{package}.{path.stem}"] = path.read_text(), package
    assert not circles(modules)


@pytest.mark.slow
@pytest.mark.parametrize("package", ["criterions", "models", "optim", "tasks"])
def test_each_package_can_be_imported_first(package):
    code = f"import mega_fairseq.{package}, fairseq.tasks as t; print(set(t.TASK_REGISTRY) >= {{'mega_translation'}})"
    said = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert said.split()[-1] == str(package in ("models", "tasks"))


def test_an_import_circle_is_detected():
    late = "def late():\n    importlib.import_module('mega_fairseq.models.a')"
    sources = {"a": "from . import b", "b": late, "c": ""}
    modules = {f"mega_fairseq.models.{name}": (source, "mega_fairseq.models") for name, source in sources.items()}
    assert list(circles(modules)) == ["mega_fairseq.models.a", "mega_fairseq.models.b"]


def test_test_files_do_not_import_each_other():
    paths = (ROOT / "tests").rglob("test_*.py")
    names = {path: [name for name in imports(path.read_text(), "tests") if ".test_" in name] for path in paths}
    assert not {path: wrong for path, wrong in names.items() if wrong}


# ------------------------------------------------------------------------------------------------ packaging


def test_the_version_is_the_same_everywhere():
    assert importlib.metadata.version(DISTRIBUTION) == mega_fairseq.__version__
    assert f"## [{mega_fairseq.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.skipif(sys.version_info < (3, 11), reason="older Pythons have ranges, not pins")
@pytest.mark.parametrize("extra", ["", "dev", "plot", "test"])
def test_every_dependency_accepts_its_pinned_version(extra):
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    constraints = [Requirement(line) for line in lines if line.strip() and not line.startswith("#")]
    pins = {canonicalize_name(c.name): next(iter(c.specifier)).version for c in constraints if c.marker.evaluate()}
    declared = map(Requirement, importlib.metadata.requires(DISTRIBUTION))
    used = [r for r in declared if r.marker is None or r.marker.evaluate({"extra": extra})]
    assert not [str(r) for r in used if not r.specifier.contains(pins.get(canonicalize_name(r.name), "0"))]


@pytest.fixture
def install(tmp_path):
    """Runs `make install` with a fake pip, which installs nothing, on a machine with or without an NVIDIA GPU."""

    def run(pip, *words, gpu=False):
        for name in ("Makefile", "setup.py", "pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, tmp_path)
        (tmp_path / "venv/bin").mkdir(parents=True)
        (tmp_path / "venv/bin/python").symlink_to(sys.executable)
        for name, commands in {"pip": pip, "nvidia-smi": str(gpu).lower()}.items():
            write_script(tmp_path / name, commands)
        environment = ["-u", "MAKEFLAGS", f"PATH={tmp_path}:{os.environ['PATH']}"]
        command = ["make", "install", "PYTHON=true", "CXX=true", "VENV=venv", "PIP=pip", *words]
        return fresh("env", *environment, *command, cwd=tmp_path)

    return run


@pytest.mark.parametrize("builds", [True, False])
def test_installing_continues_if_fastbpe_does_not_build(builds, install, tmp_path):
    said = install(f"echo longintrepr.h; case $* in *fastBPE*) {str(builds).lower()} ;; esac")
    assert ("fastBPE does not build here" in said) == (not builds)
    assert (tmp_path / "venv/fastBPE.log").read_text() == "longintrepr.h\n"
    assert (tmp_path / "venv/.ready").exists()


@pytest.mark.parametrize("gpu", [True, False])
@pytest.mark.parametrize("needed", ["nvidia-cublas", "sympy"])
def test_installing_says_beforehand_that_torch_contains_cuda_without_need(needed, gpu, install):
    said = install(f"""case $* in *--dry-run*) echo '"name": "{needed}"' ;; esac""", gpu=gpu)
    before, _ = said.split("pip Cython numpy torch\n")
    assert ("TORCH_INDEX=https://" in before) == (needed != "sympy" and not gpu)


def test_torch_comes_from_the_index_that_was_chosen(install):
    assert "pip --extra-index-url file:///builds Cython numpy torch\n" in install("", "TORCH_INDEX=file:///builds")


def test_no_file_names_a_registry_or_a_local_folder():
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True
    )
    if listing.returncode:
        pytest.skip("not a git checkout")
    files = [ROOT / name for name in listing.stdout.decode().split("\0") if name]
    assert not [str(path) for path in files if path.is_file() and PRIVATE.search(path.read_bytes())]
