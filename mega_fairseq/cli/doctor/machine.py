"""Checks that need all packages: a short training, the number of threads, number formats of the CPU, and GPUs."""

import math
import os
import tempfile
import time
from collections import Counter
from pathlib import Path

from mega_fairseq.cli.doctor import Check, Limit, Problem
from mega_fairseq.cli.doctor.packages import REBUILD

CPU_LIMIT = "/sys/fs/cgroup/cpu.max"
DRIVER = "/proc/driver/nvidia/version"
FIRST_WITH_BF16 = (8, 0)  # compute capability
NEEDED_SPACE = 32 << 20  # bytes, for the checkpoints of the training
WORTH_IT = 1.5  # speed of matrix products in bf16 relative to float32; the rest of a layer does not become faster


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
        _check_space(folder)
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


def _check_space(folder: str) -> None:
    """Otherwise a full disk would look like an error in fairseq."""
    probe = Path(folder, "probe")
    try:
        probe.write_bytes(bytes(NEEDED_SPACE))
        probe.unlink()
    except OSError as error:
        raise Problem(
            f"{folder} cannot hold a file of {NEEDED_SPACE >> 20} MiB ({error.strerror})",
            "free some space, or set TMPDIR to another folder",
        ) from None


def threads() -> str:
    """More threads than free CPUs slow each other down, by a multiple if two processes compete."""
    import torch

    usable, count = usable_cpus(), torch.get_num_threads()
    given = os.environ.get("OMP_NUM_THREADS")
    busy = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    setting = f"OMP_NUM_THREADS is {given}" if given else "OMP_NUM_THREADS is not set"
    found = f"torch uses {count} per process on {usable} CPUs, load average {busy:.1f}; {setting}"
    if count > 1 and (not given or count > math.ceil(usable - busy)):
        raise Limit(found)
    return found


def usable_cpus() -> int:
    """CPUs that this process may use; a container may have fewer than its machine."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if os.path.exists(CPU_LIMIT):
        quota, period = Path(CPU_LIMIT).read_text().split()
        usable = min(usable, math.ceil(int(quota) / int(period))) if quota.isdigit() else usable
    return usable


def cpu_bf16() -> str:
    """Newer CPUs multiply bf16 in hardware; others convert each number first."""
    plain, half = product_seconds("float32"), product_seconds("bfloat16")
    if half > plain:
        raise Limit(f"the CPU takes {half / plain:.1f} times as long to multiply matrices in bf16 as in float32")
    found = f"the CPU multiplies matrices {plain / half:.1f} times as fast in bf16 as in float32"
    if plain / half < WORTH_IT:
        raise Limit(found)
    return f"{found}, so --bf16 makes training on it faster"


def product_seconds(dtype: str, size: int = 512, repeats: int = 8) -> float:
    """CPU time of one thread for a product of two square matrices."""
    import torch

    matrix, threads, seconds = torch.ones(size, size, dtype=getattr(torch, dtype)), torch.get_num_threads(), []
    torch.set_num_threads(1)
    try:
        for _ in range(repeats):
            start = time.thread_time()
            torch.mm(matrix, matrix)
            seconds.append(time.thread_time() - start)
    finally:
        torch.set_num_threads(threads)
    return min(seconds)


def gpu() -> str:
    """Compute on each GPU in each number format, since torch also lists GPUs that it was not built for."""
    import torch

    from mega_fairseq.ops.backend import why_no_kernels

    if os.path.exists(DRIVER) and not torch.version.cuda:
        raise Problem("NVIDIA's driver is installed, but torch is built for CPUs", "install a torch built for CUDA")
    if not torch.version.cuda and not torch.version.hip:
        raise Problem("none found: torch is built for CPUs")
    torch.cuda.init()  # raises the reason if there is none
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    for device in devices:
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            ones = torch.ones(16, 16, device=device, dtype=dtype)
            (ones @ ones).sum().item()
    properties = map(torch.cuda.get_device_properties, devices)
    kinds = Counter(f"{each.name} with {each.total_memory / 2**30:.0f} GiB" for each in properties)
    found = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
    oldest = min(map(torch.cuda.get_device_capability, devices))
    if torch.version.cuda and oldest < FIRST_WITH_BF16:
        capability = ".".join(map(str, oldest))
        raise Limit(f"{found}; bf16 is emulated on compute capability {capability}", "give --fp16, not --bf16")
    for reason in map(why_no_kernels, devices):
        if reason is not None and torch.version.hip is None:
            raise Limit(f"{found}; Mega's layers are slower, since Triton's kernels do not run: {reason}", TRITON)
    return found


FEWER_THREADS = "export OMP_NUM_THREADS=1, or for large models the number of free CPUs divided by that of processes"
TRITON = "install a C compiler such as gcc, and the Triton that belongs to your torch"
CHECKS = [
    Check("training", training, REBUILD, needed=True),
    Check("threads", threads, FEWER_THREADS),
    Check("bf16", cpu_bf16, "on the CPU, train in float32"),
    Check("GPU", gpu, "train small models on the CPU"),
]
