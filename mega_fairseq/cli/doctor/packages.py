"""Python, its packages and the compiler. Each package is imported, since an installed package may be broken."""

import importlib
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from functools import partial
from pathlib import Path
from typing import Any, Dict, Tuple

import mega_fairseq
from mega_fairseq.cli.doctor.check import Check, Limit, Problem

OLDEST_PYTHON, NEWEST_PYTHON, OLDEST_TORCH = (3, 8), (3, 13), (2, 4)
PYTHON_OF_FIXED = (3, 11)  # fairseq 0.12.2 does not run from here on; fairseq-fixed does

if sys.version_info >= PYTHON_OF_FIXED:
    GET_TORCH = "pip install 'torch>=2.4'"
    GET_NUMPY = "pip install numpy"
    GET_CONFIGS = "pip install omegaconf==2.3.0 hydra-core==1.3.2"
else:
    GET_TORCH = "pip install 'torch>=2.4,<2.6'"
    GET_NUMPY = "pip install 'numpy<2'"
    GET_CONFIGS = "pip install 'pip<24.1', then pip install 'omegaconf<2.1' 'hydra-core<1.1'"
GET_FASTBPE = (
    "for --bpe fastbpe: pip install Cython setuptools wheel, "
    "then pip install --no-deps --no-build-isolation fastBPE==0.1.0"
)
GET_COMPILER = "to build fairseq or fastBPE, or for torch.compile: install g++, or name a compiler in CXX"


def python() -> str:
    found, version = platform.python_version(), sys.version_info[:2]
    if version < OLDEST_PYTHON:
        raise Problem(f"{found}, older than {_dotted(OLDEST_PYTHON)}")
    supported = f"{_dotted(OLDEST_PYTHON)} to {_dotted(NEWEST_PYTHON)}"
    if version > NEWEST_PYTHON:
        raise Limit(f"{found}, not tested; {supported} are", f"use Python {_dotted(NEWEST_PYTHON)} if something fails")
    return f"{found} ({supported} are supported)"


def _dotted(version: Tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def plugin_folder() -> str:
    return f"{mega_fairseq.__version__} in {os.path.abspath(mega_fairseq.__path__[0])}"


def imported(name: str) -> Any:
    module = importlib.import_module(name)
    if getattr(module, "__file__", None) is None and hasattr(module, "__path__"):
        raise Problem(f"a folder of that name, not a package: {next(iter(module.__path__))}")
    return module


def package(name: str) -> str:
    """Import the package and return its version."""
    return getattr(imported(name), "__version__", None) or distributions(name).get(name, "unknown version")


def distributions(*names: str) -> Dict[str, str]:
    """Versions of the installed ones among these distributions, from their metadata."""
    from importlib import metadata  # not in Python 3.7, whose users should still see the report

    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def torch_build() -> str:
    torch = imported("torch")
    if release(torch.__version__) < OLDEST_TORCH:
        raise Problem(f"{torch.__version__}, older than {_dotted(OLDEST_TORCH)}")
    if torch.version.cuda:
        return f"{torch.__version__}, built for CUDA {torch.version.cuda}"
    return f"{torch.__version__}, built for {'ROCm' if torch.version.hip else 'CPUs'}"


def release(version: str) -> Tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def torch_with_numpy() -> str:
    torch, numpy = imported("torch"), imported("numpy")
    if torch.from_numpy(numpy.ones(3)).numpy().sum() != 3:
        raise Problem("an array changes when converted to a tensor and back")
    return "arrays convert to tensors and back"


def fastbpe() -> str:
    version = package("fastBPE")
    if not hasattr(imported("fastBPE"), "fastBPE"):
        raise Problem(f"{version}, without the class fastBPE")
    return version


def matplotlib() -> str:
    imported("matplotlib.figure")  # with the parts that are compiled against numpy
    return package("matplotlib")


def compiler() -> str:
    names = os.environ.get("CXX", "").split()[:1] or ["c++", "g++", "clang++"]
    path = next((path for path in map(shutil.which, names) if path), None)
    if path is None:
        raise Problem(f"none called {' or '.join(names)}")
    ran = subprocess.run([path, "--version"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=10)
    found = ran.stdout.decode(errors="replace").splitlines()[0]
    if ran.returncode:
        raise Problem(f"{path} fails: {found}")
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        raise Limit(f"{found}, without Python.h", "to build fairseq or fastBPE, install Python's headers (python3-dev)")
    return found


CHECKS = [
    Check("Python", python, f"install Python {_dotted(NEWEST_PYTHON)}", needed=True),
    Check("mega_fairseq", plugin_folder, "install it again", needed=True),
    Check("torch", torch_build, GET_TORCH, needed=True),
    Check("numpy", partial(package, "numpy"), GET_NUMPY, needed=True),
    Check("torch with numpy", torch_with_numpy, "pip install 'numpy<2'", needed=True, after=("torch", "numpy")),
    Check("omegaconf", partial(package, "omegaconf"), GET_CONFIGS, needed=True),
    Check("hydra", partial(package, "hydra"), GET_CONFIGS, needed=True),
    Check("sacrebleu", partial(package, "sacrebleu"), "pip install sacrebleu", needed=True),
    Check("sentencepiece", partial(package, "sentencepiece"), "for --bpe sentencepiece: pip install sentencepiece"),
    Check("fastBPE", fastbpe, GET_FASTBPE),
    Check("matplotlib", matplotlib, "for figures: pip install matplotlib"),
    Check("C++ compiler", compiler, GET_COMPILER),
]
