"""`mega-fairseq doctor`: check what training and evaluation need, and print a remedy for each problem.

`python -m torch.utils.collect_env` describes the machine and the build of torch.
"""

import argparse
import contextlib
import importlib
import importlib.util
import os
import platform
import sys
import tempfile
import textwrap
import warnings
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Iterator, Tuple

import mega_fairseq
from mega_fairseq.cli.cpu import GLIBC, Limit, cpu_bf16, kept_memory
from mega_fairseq.cli.output import quiet_output

TESTED = {"fairseq": "0.12.2", "fairseq-fixed": "0.12.3.1"}
NEW = sys.version_info >= (3, 11)  # fairseq 0.12.2 does not run there, but fairseq-fixed does
INSTALL = "pip install -c constraints.txt . in a clone of this package, as in docs/install.md"


def run(arguments: argparse.Namespace) -> None:
    with quiet_output(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = list(examine(CHECKS))
    for mark, name, text in rows:
        print(f"{mark:4}  {name:13}  {text}")
    if rows[-1][0] == "no":
        print(f"Training and evaluation cannot work here; begin with {rows[-1][1]}, then run this again.")
        sys.exit(1)
    print("Training and evaluation work here; each note is a restriction with its remedy.")


def examine(checks: Any) -> Iterator[Tuple[str, str, str]]:
    """Mark, name and result of each check, up to a failed one that training and evaluation need."""
    for name, needed, look, remedy in checks:
        try:
            mark, text = "ok", look()
        except Limit as limit:
            mark, text = "note", str(limit)
        except (Exception, SystemExit) as error:  # a broken package may raise anything
            mark, text = "no" if needed else "note", textwrap.shorten(f"{type(error).__name__}: {error}", 300)
            text = f"{text}; {remedy}"
        yield mark, name, text
        if mark == "no":
            return


def fairseq() -> str:
    """Which of the two distributions is installed, without importing it."""
    found = {}
    for name in TESTED:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    names = " and ".join(map(" ".join, found.items()))
    if len(found) > 1:
        raise RuntimeError(f"{names} overwrite each other")
    if importlib.util.find_spec("fairseq") is None:
        raise RuntimeError("not installed")
    if NEW and "fairseq" in found:
        raise RuntimeError(f"{names} does not run on Python 3.11 and newer")
    if not found or not found.items() <= TESTED.items():
        raise Limit(f"{names or 'a copy of unknown version'}, not tested; {INSTALL}")
    return names


def torch() -> str:
    import torch

    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 4):
        raise RuntimeError(f"{torch.__version__} is older than 2.4")
    torch.ones(1).numpy()  # fails if it was built for another numpy
    return f"{torch.__version__}, built for {f'CUDA {torch.version.cuda}' if torch.version.cuda else 'CPUs'}"


def package(name: str) -> str:
    return str(getattr(importlib.import_module(name), "__version__", "installed"))


def training() -> str:
    """Binarise a text, train on it for one update, and resume for a second."""
    from fairseq import options
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf
    from fairseq_cli import preprocess, train

    import mega_fairseq.criterions
    import mega_fairseq.models
    import mega_fairseq.tasks  # noqa: F401 - registers them

    with tempfile.TemporaryDirectory() as folder:
        text, data = Path(folder, "text"), Path(folder, "data")
        text.write_text("a b c d e f g h\n" * 50)
        # fairseq 0.12.2 reads the validation set even if it does not validate.
        words = ["--only-source", f"--trainpref={text}", f"--validpref={text}", f"--destdir={data}"]
        preprocess.main(options.get_preprocessing_parser().parse_args(words))
        words = [str(data), "--task=mega_language_modeling", "--arch=mega_lm_small", "--decoder-layers=1", "--cpu"]
        words += ["--criterion=mega_lm_cross_entropy", "--optimizer=adam", "--max-tokens=300", "--num-workers=0"]
        words += ["--disable-validation", "--distributed-world-size=1", f"--save-dir={folder}", "--max-update"]
        for updates in ("1", "2"):
            args = options.parse_args_and_arch(options.get_training_parser(), [*words, updates])
            train.main(convert_namespace_to_omegaconf(args))
    return "fairseq trains a model and resumes from its checkpoint"


def gpu() -> str:
    """Compute on each GPU, since torch also lists GPUs that it was not built for."""
    import torch

    from mega_fairseq.ops.backend import why_no_kernels

    if os.path.exists("/proc/driver/nvidia/version") and not torch.version.cuda:
        raise Limit("NVIDIA's driver is installed, but torch is built for CPUs; install a torch built for CUDA")
    torch.cuda.init()  # raises the reason if there is none
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    text = ", ".join(map(torch.cuda.get_device_name, devices))
    for device in devices:
        torch.ones(16, device=device, dtype=torch.bfloat16).sum().item()
        reason = why_no_kernels(device)
        if reason is not None and torch.version.hip is None:
            raise Limit(
                f"{text}; Mega's layers are slower, since Triton's kernels do not run: {reason}; install a C compiler "
                "such as gcc, and the Triton that belongs to your torch"
            )
    return text


CHECKS = [  # name, whether training and evaluation need it, what describes it, remedy for an error
    ("Python", True, platform.python_version, ""),
    ("mega_fairseq", True, lambda: f"{mega_fairseq.__version__} in {mega_fairseq.__path__[0]}", ""),
    ("fairseq", True, fairseq, INSTALL),
    ("torch", True, torch, INSTALL),
    ("sacrebleu", True, partial(package, "sacrebleu"), INSTALL),
    ("matplotlib", False, partial(package, "matplotlib"), "for figures: pip install matplotlib"),
    ("training", True, training, INSTALL),
    ("bf16", False, cpu_bf16, "on the CPU, train in float32"),
    *[("memory", False, kept_memory, "on the CPU, train with the default settings")] * GLIBC,
    ("GPU", False, gpu, "train small models on the CPU"),
]
