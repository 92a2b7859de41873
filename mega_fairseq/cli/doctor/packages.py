"""Python, its packages and the compiler. Each package is imported, since an installed package may be broken."""

import contextlib
import importlib
import importlib.util
import os
import platform
import re
import shutil
import sys
import sysconfig
from functools import partial
from importlib import metadata
from pathlib import Path

import mega_fairseq
from mega_fairseq.cli.doctor import Check, Limit, Problem

NEW = sys.version_info >= (3, 11)  # fairseq 0.12.2 does not run there, but fairseq-fixed does
OFFICIAL, FIXED = ("fairseq", "0.12.2"), ("fairseq-fixed", "0.12.3.1")

if NEW:
    GET_TORCH = "pip install 'torch>=2.4'"
    GET_CONFIGS = "pip install omegaconf==2.3.0 hydra-core==1.3.2"
    REBUILD = (
        "pip uninstall -y fairseq fairseq-fixed, then pip install Cython numpy torch setuptools wheel, "
        "then pip install --no-cache-dir --no-build-isolation fairseq-fixed==0.12.3.1"
    )
else:
    GET_TORCH = "pip install 'torch>=2.4,<2.6' 'numpy<2'"
    GET_CONFIGS = "pip install 'pip<24.1', then pip install 'omegaconf<2.1' 'hydra-core<1.1'"
    REBUILD = (
        "pip uninstall -y fairseq fairseq-fixed, then pip install 'pip<24.1', "
        "then pip install --no-cache-dir fairseq==0.12.2 'torch<2.6' 'numpy<2'"
    )
GET_FASTBPE = (
    "for --bpe fastbpe: pip install Cython setuptools wheel, "
    "then pip install --no-deps --no-build-isolation fastBPE==0.1.0"
)
GET_COMPILER = "to build fairseq or fastBPE, or for torch.compile: install g++, or set CXX to a compiler"


def python() -> str:
    found = platform.python_version()
    if not (3, 8) <= sys.version_info[:2] <= (3, 13):
        raise Limit(f"{found}, not tested (3.8 to 3.13 are)", "use Python 3.13 if something fails")
    return f"{found} (3.8 to 3.13 are supported)"


def plugin() -> str:
    return f"{mega_fairseq.__version__} in {os.path.abspath(mega_fairseq.__path__[0])}"


def check_shadow(distribution: str, name: str) -> None:
    """Raise an error if a folder on Python's path hides the installed package of this name."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        installed = Path(metadata.distribution(distribution).locate_file(f"{name}/__init__.py"))
        spec = importlib.util.find_spec(name)
        imported = None if spec is None or spec.origin is None else Path(spec.origin)
        if installed.exists() and imported is not None and not installed.samefile(imported):
            raise Limit(
                f"{distribution} {metadata.version(distribution)}, hidden by {imported.parent}",
                f"if that is not intended, remove {imported.parents[1]} from PYTHONPATH, or start Python elsewhere",
            )


def package(name: str) -> str:
    """Import a package or module, and return the version of the package."""
    top = name.split(".")[0]
    check_shadow(top, top)
    module = importlib.import_module(name)
    return getattr(module, "__version__", None) or metadata.version(top)


def torch() -> str:
    import torch

    found = torch.__version__
    if tuple(map(int, re.findall(r"\d+", found)[:2])) < (2, 4):
        raise Problem(f"{found}, older than 2.4")
    try:
        torch.ones(1).numpy()
    except RuntimeError as error:
        raise Problem(f"{found}, built for another numpy: {error}", "pip install 'numpy<2'") from None
    return f"{found}, built for CUDA {torch.version.cuda}" if torch.version.cuda else f"{found}, built without CUDA"


def fairseq() -> str:
    """Which of the two distributions provides `import fairseq`. Only `training` imports it, if all packages work."""
    found = []
    for name, _ in (OFFICIAL, FIXED):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found.append((name, metadata.version(name)))
    named = " and ".join(map(" ".join, found))
    if not found:
        spec = importlib.util.find_spec("fairseq")
        if spec is None or spec.origin is None:  # a folder of that name has no origin
            raise Problem("not installed")
        raise Limit(f"a copy of unknown version in {os.path.dirname(spec.origin)}")
    check_shadow(found[0][0], "fairseq")
    if len(found) > 1:
        raise Problem(f"{named}, which overwrite each other")
    if found == [OFFICIAL] and NEW:
        raise Problem(f"{named}, which does not run on Python 3.11 and newer")
    if found not in ([OFFICIAL], [FIXED]):
        raise Limit(f"{named}, not tested")
    return named


def tensorboard() -> str:
    """fairseq uses tensorboard or tensorboardX."""
    with contextlib.suppress(ImportError):
        return f"tensorboard {package('tensorboard')}"
    return f"tensorboardX {package('tensorboardX')}"


def compiler() -> str:
    names = os.environ.get("CXX", "").split()[:1] or ["c++", "g++", "clang++"]
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        raise Problem(f"none called {' or '.join(names)}")
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        raise Limit(f"{path}, without Python.h", "to build fairseq or fastBPE, install Python's headers (python3-dev)")
    return path


CHECKS = [
    Check("Python", python, "use a newer Python", needed=True),
    Check("mega_fairseq", plugin, "install it again", needed=True),
    Check("numpy", partial(package, "numpy"), GET_TORCH, needed=True),
    Check("torch", torch, GET_TORCH, needed=True),
    Check("omegaconf", partial(package, "omegaconf"), GET_CONFIGS, needed=True),
    Check("hydra", partial(package, "hydra"), GET_CONFIGS, needed=True),
    Check("sacrebleu", partial(package, "sacrebleu"), "pip install sacrebleu", needed=True),
    Check("fairseq", fairseq, REBUILD, needed=True),
    Check("sentencepiece", partial(package, "sentencepiece"), "for --bpe sentencepiece: pip install sentencepiece"),
    Check("fastBPE", partial(package, "fastBPE"), GET_FASTBPE),
    Check("matplotlib", partial(package, "matplotlib.figure"), "for figures: pip install matplotlib"),
    Check("TensorBoard", tensorboard, "for --tensorboard-logdir: pip install tensorboardX"),
    Check("C++ compiler", compiler, GET_COMPILER),
]
