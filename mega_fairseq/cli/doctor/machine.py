"""CPUs, memory, GPUs, and the number formats that work on them."""

import math
import os
from collections import Counter
from typing import Any, List

from mega_fairseq.cli.doctor.check import Check, Limit, Problem, summary

GIB = 1 << 30
LITTLE = 2 * GIB  # what fairseq, torch and training mega_transformer_base take, without batches
MEMORY = "/proc/meminfo"
CPU_LIMIT = "/sys/fs/cgroup/cpu.max"
MEMORY_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
DRIVER = "/proc/driver/nvidia/version"
FIRST_WITH_BF16 = (8, 0)  # compute capability


def threads() -> str:
    """More threads than free CPUs slow each other down, several times where two processes compete."""
    import torch

    usable, count = usable_cpus(), torch.get_num_threads()
    given = os.environ.get("OMP_NUM_THREADS")
    busy = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    setting = f"OMP_NUM_THREADS is {given}" if given else "OMP_NUM_THREADS is not set"
    found = f"torch uses {count} per process on {usable} CPUs, {busy:.1f} busy; {setting}"
    if count > 1 and (not given or count > math.ceil(usable - busy)):
        raise Limit(found)
    return found


def usable_cpus() -> int:
    """CPUs that this process may use; a container may have fewer than its machine."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if os.path.exists(CPU_LIMIT):
        with open(CPU_LIMIT) as file:
            quota, period = file.read().split()
        usable = min(usable, math.ceil(int(quota) / int(period))) if quota.isdigit() else usable
    return usable


def memory() -> str:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in filter(os.path.exists, MEMORY_LIMITS):
        with open(path) as file:
            limit = file.read().strip()
        total = min(total, int(limit)) if limit.isdigit() else total
    if not os.path.exists(MEMORY):
        return f"{total / GIB:.1f} GiB"
    with open(MEMORY) as file:
        free = next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))
    found = f"{min(free, total) / GIB:.1f} of {total / GIB:.1f} GiB free"
    if min(free, total) < LITTLE:
        raise Limit(found)
    return found


# --------------------------------------------------------------------------------------------------- GPUs


def gpu() -> str:
    """Multiply a matrix on each GPU, since torch also lists GPUs that it was not built for."""
    import torch

    if not torch.cuda.is_available():
        raise no_gpu(torch)
    for device in gpus():
        multiply(device, "float32")
    kinds = Counter(
        f"{properties.name} with {properties.total_memory / GIB:.0f} GiB"
        for properties in map(torch.cuda.get_device_properties, gpus())
    )
    version = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
    return f"{', '.join(f'{count} x {kind}' for kind, count in kinds.items())}, {version}"


def no_gpu(torch: Any) -> Problem:
    if torch.version.cuda or torch.version.hip:
        try:
            torch.cuda.init()
        except Exception as error:
            return Problem(f"none that torch can use: {summary(error)}")
        return Problem("none that torch can use")
    if os.path.exists(DRIVER):
        return Problem("NVIDIA's driver is installed, but torch is built for CPUs", "install a torch built for CUDA")
    return Problem("none, and torch is built for CPUs")


def gpus() -> List[str]:
    import torch

    return [f"cuda:{index}" for index in range(torch.cuda.device_count())]


def multiply(device: str, dtype: str) -> None:
    """A matrix product and its gradient, with numbers that every format represents exactly."""
    import torch

    ones = torch.ones(16, 16, device=device, dtype=getattr(torch, dtype), requires_grad=True)
    (ones @ ones).sum().backward()
    if ones.grad.tolist() != [[32.0] * 16] * 16:
        raise Problem(f"wrong results in {dtype} on {device}")


def fp16_on_gpus() -> str:
    for device in gpus():
        multiply(device, "float16")
    return "works: --fp16"


def bf16_on_gpus() -> str:
    import torch

    for device in gpus():
        multiply(device, "bfloat16")
    oldest = min(map(torch.cuda.get_device_capability, gpus()))
    if torch.version.cuda and oldest < FIRST_WITH_BF16:
        raise Limit(f"emulated and slow on compute capability {oldest[0]}.{oldest[1]}", "give --fp16 instead")
    return "works: --bf16"


# --------------------------------------------------------------------------------------------------- CPUs


def bf16_on_cpu() -> str:
    multiply("cpu", "bfloat16")
    return "works: --bf16"


def processes() -> str:
    """A process group of one member, over the network that several would use."""
    import torch
    from torch import distributed

    if not distributed.is_available():
        raise Problem("this torch is built without torch.distributed")
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        distributed.all_reduce(torch.ones(1))
    finally:
        distributed.destroy_process_group()
    nccl = "nccl for GPUs is available" if distributed.is_nccl_available() else "no nccl"
    raise Limit(
        f"gloo works, {nccl}; fairseq's pytorch_ddp does not run on CPUs", "on CPUs give --ddp-backend legacy_ddp"
    )


FEWER_THREADS = "export OMP_NUM_THREADS=1, or for large models the number of free CPUs divided by that of processes"
CHECKS = [
    Check("threads", threads, FEWER_THREADS, after=("torch",)),
    Check("memory", memory, "train a smaller model, or lower --max-tokens"),
    Check("GPU", gpu, "train small models on the CPU", after=("torch",)),
    Check("fp16 on the GPU", fp16_on_gpus, "train without --fp16", after=("GPU",)),
    Check("bf16 on the GPU", bf16_on_gpus, "train without --bf16", after=("GPU",)),
    Check("bf16 on the CPU", bf16_on_cpu, "train without --bf16", after=("torch",)),
    Check("several processes", processes, "train in one process", after=("torch",)),
]
