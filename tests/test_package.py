"""The package as a whole: what importing it loads, imports between layers, packaging files."""

import ast
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import mega_fairseq
from tests.helpers.commands import fresh
from tests.helpers.forking import write_script

ROOT = Path(__file__).resolve().parent.parent
DISTRIBUTION = "mega-fairseq"
CITATION = ROOT / "CITATION.cff"
# The packages that the files of a layer may import, besides the standard library.
LAYERS = {
    "ops": ("torch", "triton", "mega_fairseq.ops"),
    "modules": ("torch", "mega_fairseq.ops", "mega_fairseq.modules"),
    "acceleration": ("torch", "mega_fairseq.ops", "mega_fairseq.modules", "mega_fairseq.acceleration"),
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
            yield node.value.replace(":", ".")  # "module:function" of a form by Triton kernels


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


def late_imports(source):
    """Names that functions import, which other code does without."""
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    return {name for function in functions for name in imports(ast.unparse(function), "mega_fairseq.ops")}


def test_only_the_dispatcher_imports_triton_late():
    files = [path for layer in LAYERS for path in (ROOT / "mega_fairseq" / layer).rglob("*.py")]
    late = {
        path.name
        for path in files
        if any("triton" in name or "kernels" in name for name in late_imports(path.read_text()))
    }
    assert late == {"backend.py"}


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


def test_the_version_and_its_date_are_the_same_everywhere():
    version = re.escape(mega_fairseq.__version__)
    assert re.fullmatch(version, importlib.metadata.version(DISTRIBUTION))
    date = re.search(rf"^## \[{version}\] - (\d{{4}}-\d\d-\d\d)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert re.search(rf"^version: {version}\ndate-released: {date.group(1)}$", CITATION.read_text(), re.MULTILINE)


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
        shutil.copytree(ROOT / "runtime", tmp_path / "runtime")
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


# ------------------------------------------------------------------------------------------------ publishing


@pytest.fixture
def files():
    """Paths of all files of the repository."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True)
    if listing.returncode:
        pytest.skip("not a git checkout")
    return [name for name in listing.stdout.decode().split("\0") if (ROOT / name).is_file()]


def build(folder, names, step):
    """Calls a function of setuptools in a copy of these files."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    (folder / "made").mkdir()
    fresh(sys.executable, "-c", f"from setuptools import build_meta; build_meta.{step}('made')", cwd=folder)


@pytest.mark.slow
def test_the_source_distribution_has_all_files(files, tmp_path):
    files = [name for name in files if not name.startswith(".")]  # settings of git and of services
    build(tmp_path, files, "build_sdist")
    (packed,) = tmp_path.glob("made/*.tar.gz")
    with tarfile.open(packed) as archive:
        assert set(files) <= {name.partition("/")[2] for name in archive.getnames()}


@pytest.mark.slow
def test_the_wheel_has_the_package_with_its_types_only(files, tmp_path):
    build(tmp_path, [name for name in files if not name.startswith((".", "tests/golden/"))], "build_wheel")
    (packed,) = tmp_path.glob("made/*.whl")
    with zipfile.ZipFile(packed) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == {name for name in files if name.startswith("mega_fairseq/")}


@pytest.mark.parametrize("address", ["", "https://example.org/mega_fairseq"])
def test_links_of_the_package_page_are_absolute(address, tmp_path):
    setup = (ROOT / "setup.py").read_text()
    (tmp_path / "setup.py").write_text(re.sub('(?m)^REPOSITORY = ".*"', f'REPOSITORY = "{address}"', setup))
    build(tmp_path, ["pyproject.toml", "README.md", "mega_fairseq/__init__.py"], "prepare_metadata_for_build_wheel")
    (metadata,) = (path.read_text() for path in tmp_path.glob("made/*.dist-info/METADATA"))
    assert not re.search(r"\]\((?!https://)", metadata)
    targets = re.findall(rf"\]\({address}/blob/v{mega_fairseq.__version__}/([^)#]*)", metadata)
    assert ("docs/install.md" in targets) == bool(address)
    assert all((ROOT / target).exists() for target in targets)


def test_no_file_names_a_registry_or_a_local_folder(files):
    assert not [name for name in files if PRIVATE.search((ROOT / name).read_bytes())]
