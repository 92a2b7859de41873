"""`mega-fairseq doctor`: check what training and evaluation need, and print a remedy for each problem."""

import argparse
import contextlib
import importlib
import importlib.util
import os
import platform
import subprocess
import sys
import tempfile
import time
import warnings
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Callable, Iterable, List, NamedTuple

import mega_fairseq
from mega_fairseq.cli.output import quiet_output

NEW = sys.version_info >= (3, 11)  # fairseq 0.12.2 does not run there, but fairseq-fixed does
OFFICIAL, FIXED = ("fairseq", "0.12.2"), ("fairseq-fixed", "0.12.3.1")
INSTALL = "pip install -c constraints.txt . in a clone of this package, as in docs/install.md"
TRITON = "install a C compiler such as gcc, and the Triton that belongs to your torch"
NVIDIA_DRIVER = "/proc/driver/nvidia/version"
GLIBC = platform.libc_ver()[0] == "glibc"
WORTH_SETTING = 1.05  # speed of an output layer
WORTH_IT = 1.5  # speed of matrix products in bf16 relative to float32; the rest of a layer does not become faster
LONGEST = 120  # characters of an error
# glibc then keeps freed memory for the next update; otherwise the kernel clears its pages again in each one. It reads
# them when a process starts. It is the same with MALLOC_MMAP_THRESHOLD_, but older versions ignore large ones.
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "100000000000"}
UPDATE = """
import time, torch
torch.set_num_threads(1)
features, weight = torch.ones(4096, 128), torch.ones(4000, 128, requires_grad=True)
seconds = []
for _ in range(4):
    start = time.thread_time()
    (features @ weight.t()).log_softmax(1).sum().backward()
    seconds.append(time.thread_time() - start)
print(min(seconds))
"""


class Problem(Exception):
    """What a failed check says, and a remedy if that of the check does not apply."""

    def __init__(self, text: str, remedy: str = ""):
        super().__init__(text)
        self.remedy = remedy


class Limit(Problem):
    """A restriction, or a version that was not tested with this package."""


class Check(NamedTuple):
    name: str
    look: Callable[[], str]  # describes what works; any exception is a failure
    remedy: str
    needed: bool = False  # training and evaluation need it


class Row(NamedTuple):
    mark: str  # ok, note, or no: training or evaluation cannot work
    name: str
    text: str
    remedy: str = ""


def run(arguments: argparse.Namespace) -> None:
    with quiet_output(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = examine(INSTALLED)
        if not any(row.mark == "no" for row in rows):
            rows += examine(WORKING)
    for row in rows:
        print(f"{row.mark:4}  {row.name:13}  {'; '.join(filter(None, row[2:]))}")
    broken = [row for row in rows if row.mark == "no"]
    if broken:
        print(f"Training and evaluation cannot work here; begin with {broken[0].name}, then run this again.")
        sys.exit(1)
    print("Training and evaluation work here; each note is a restriction with its remedy.")


def examine(checks: Iterable[Check]) -> List[Row]:
    rows = []
    for check in checks:
        try:
            rows.append(Row("ok", check.name, check.look()))
        except (Exception, SystemExit) as error:  # a broken package may raise anything
            mark = "no" if check.needed and not isinstance(error, Limit) else "note"
            text = " ".join(next(filter(str.strip, str(error).splitlines()), "").split())
            if not isinstance(error, (Problem, ModuleNotFoundError)):
                text = f"{type(error).__name__}: {text}"
            rows.append(Row(mark, check.name, text[:LONGEST], getattr(error, "remedy", "") or check.remedy))
    return rows


# ---------------------------------------------------------------------------------------- installed


def python() -> str:
    version = platform.python_version()
    if not (3, 8) <= sys.version_info[:2] <= (3, 13):
        raise Limit(f"{version}, not tested (3.8 to 3.13 are)")
    return version


def fairseq() -> str:
    """Which of the two distributions is installed, without importing it."""
    installed = []
    for name, _ in (OFFICIAL, FIXED):
        with contextlib.suppress(metadata.PackageNotFoundError):
            installed.append((name, metadata.version(name)))
    names = " and ".join(map(" ".join, installed))
    if len(installed) > 1:
        raise Problem(f"{names}, which overwrite each other")
    if importlib.util.find_spec("fairseq") is None:
        raise Problem("not installed")
    if installed == [OFFICIAL] and NEW:
        raise Problem(f"{names}, which does not run on Python 3.11 and newer")
    if installed not in ([OFFICIAL], [FIXED]):
        raise Limit(f"{names or 'a copy of unknown version'}, not tested")
    return names


def torch() -> str:
    import torch

    version = torch.__version__
    if tuple(map(int, version.split(".")[:2])) < (2, 4):
        raise Problem(f"{version}, older than 2.4")
    try:
        torch.ones(1).numpy()
    except RuntimeError as error:
        raise Problem(f"built for another numpy: {error}", "pip install 'numpy<2'") from None
    return f"{version}, built for CUDA {torch.version.cuda}" if torch.version.cuda else f"{version}, built for CPUs"


def package(name: str) -> str:
    return str(getattr(importlib.import_module(name), "__version__", "installed"))


# ------------------------------------------------------------------------------------------ working


def training() -> str:
    """Binarise a text, train on it for one update, and resume for a second."""
    import torch
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
        words += ["--disable-validation", "--distributed-world-size=1", f"--save-dir={folder}"]
        for updates in (1, 2):
            parser = options.get_training_parser()
            args = options.parse_args_and_arch(parser, [*words, f"--max-update={updates}"])
            train.main(convert_namespace_to_omegaconf(args))
        saved = torch.load(Path(folder, "checkpoint_last.pt"), weights_only=True)
    updates = saved["optimizer_history"][-1]["num_updates"]
    if updates != 2:
        raise Problem(f"a resumed training has {updates} updates instead of 2")
    return "fairseq trains a model and resumes from its checkpoint"


def cpu_bf16() -> str:
    """Newer CPUs multiply bf16 in hardware; others convert each number first."""
    ratio = product_seconds("float32") / product_seconds("bfloat16")
    text = f"the CPU multiplies matrices {ratio:.2f} times as fast in bf16 as in float32"
    if ratio < WORTH_IT:
        raise Limit(text)
    return f"{text}, so --bf16 makes training on it faster"


def product_seconds(dtype: str, size: int = 512, repeats: int = 8) -> float:
    """CPU time of one thread for a product of two square matrices."""
    import torch

    matrix, count, seconds = torch.ones(size, size, dtype=getattr(torch, dtype)), torch.get_num_threads(), []
    torch.set_num_threads(1)
    try:
        for _ in range(repeats):
            start = time.thread_time()
            torch.mm(matrix, matrix)
            seconds.append(time.thread_time() - start)
    finally:
        torch.set_num_threads(count)
    return min(seconds)


def kept_memory() -> str:
    """What KEEP_MEMORY gains where a translator has its largest tensors."""
    gain = update_seconds() / update_seconds(**KEEP_MEMORY)
    text = f"on the CPU, a translator's output layer trains {gain:.2f} times as fast if freed memory is kept"
    if all(os.environ.get(name) == value for name, value in KEEP_MEMORY.items()):
        return f"{text}, as it is here"
    if gain < WORTH_SETTING:
        return text
    raise Limit(text)


def update_seconds(**settings: str) -> float:
    """CPU time of a training step in a new process with these settings of the C library and no others."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    words, environment = [sys.executable, "-c", UPDATE], {**environment, **settings}
    return float(subprocess.run(words, env=environment, check=True, capture_output=True, text=True).stdout)


def gpu() -> str:
    """Compute on each GPU, since torch also lists GPUs that it was not built for."""
    import torch

    from mega_fairseq.ops.backend import why_no_kernels

    if os.path.exists(NVIDIA_DRIVER) and not torch.version.cuda:
        raise Problem("NVIDIA's driver is installed, but torch is built for CPUs", "install a torch built for CUDA")
    if not torch.version.cuda and not torch.version.hip:
        raise Problem("none: torch is built for CPUs")
    torch.cuda.init()  # raises the reason if there is none
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    text = ", ".join(torch.cuda.get_device_name(device) for device in devices)
    for device in devices:
        torch.ones(16, device=device, dtype=torch.bfloat16).sum().item()
        reason = why_no_kernels(device)
        if reason is not None and torch.version.hip is None:
            raise Limit(f"{text}; Mega's layers are slower, since Triton's kernels do not run: {reason}", TRITON)
    return text


INSTALLED = [
    Check("Python", python, "use Python 3.13 if something fails", needed=True),
    Check("mega_fairseq", lambda: f"{mega_fairseq.__version__} in {mega_fairseq.__path__[0]}", "install it again"),
    Check("fairseq", fairseq, INSTALL, needed=True),
    Check("torch", torch, INSTALL, needed=True),
    *(Check(name, partial(package, name), INSTALL, needed=True) for name in ("omegaconf", "hydra", "sacrebleu")),
    Check("matplotlib", partial(package, "matplotlib"), "for figures: pip install matplotlib"),
]
WORKING = [
    Check("training", training, INSTALL, needed=True),
    Check("bf16", cpu_bf16, "on the CPU, train in float32"),
    *[Check("memory", kept_memory, f"export {' '.join(map('='.join, KEEP_MEMORY.items()))}")] * GLIBC,
    Check("GPU", gpu, "train small models on the CPU"),
]
