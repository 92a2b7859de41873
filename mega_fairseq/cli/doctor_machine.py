"""The machine as the doctor finds it: processors, memory, GPUs, and the number formats that really work on them."""

import os
from collections import Counter
from functools import partial
from typing import Any, List

from mega_fairseq.cli.doctor_check import Check, Limit, Trouble, said

GIB = 1 << 30
LITTLE = 2 * GIB  # fairseq, torch, and mega_transformer_base in training, without its batches
MEMORY = "/proc/meminfo"
CONTAINER_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
DRIVER = "/proc/driver/nvidia/version"
FIRST_WITH_BF16 = (8, 0)  # compute capability
KERNELS = {"flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION"}
USUAL_WIDTHS, MEGA_WIDTHS = (64, 64), (128, 1024)  # of keys, of values


def cpus() -> str:
    import torch

    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    found = f"{usable}, and torch takes {torch.get_num_threads()} threads"
    if torch.get_num_threads() > usable:
        raise Limit(found, f"set OMP_NUM_THREADS={usable}, as more threads than CPUs slow each other down")
    return found


def memory() -> str:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in filter(os.path.exists, CONTAINER_LIMITS):
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
    """Each one multiplies a matrix: one that is only listed may be of no use to this torch."""
    import torch

    if not torch.cuda.is_available():
        raise why_none(torch)
    for device in gpus():
        product(device, "float32")
    kinds = Counter(
        f"{properties.name} with {properties.total_memory / GIB:.0f} GiB"
        for properties in map(torch.cuda.get_device_properties, gpus())
    )
    version = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
    return f"{', '.join(f'{count} x {kind}' for kind, count in kinds.items())}, {version}"


def why_none(torch: Any) -> Trouble:
    if torch.version.cuda or torch.version.hip:
        try:
            torch.cuda.init()
        except Exception as error:
            return Trouble(f"none that torch can use: {said(error)}")
        return Trouble("none that torch can use")
    if os.path.exists(DRIVER):
        return Trouble("NVIDIA's driver is here, but torch is built for CPUs", "install a torch that is built for CUDA")
    return Trouble("none, and torch is built for CPUs")


def gpus() -> List[str]:
    import torch

    return [f"cuda:{index}" for index in range(torch.cuda.device_count())]


def product(device: str, dtype: str) -> None:
    """A product and its gradient, in numbers that every format holds exactly."""
    import torch

    ones = torch.ones(16, 16, device=device, dtype=getattr(torch, dtype), requires_grad=True)
    (ones @ ones).sum().backward()
    if ones.grad.tolist() != [[32.0] * 16] * 16:
        raise Trouble(f"wrong numbers in {dtype} on {device}")


def fp16_on_gpus() -> str:
    for device in gpus():
        product(device, "float16")
    return "works: --fp16"


def bf16_on_gpus() -> str:
    import torch

    for device in gpus():
        product(device, "bfloat16")
    oldest = min(map(torch.cuda.get_device_capability, gpus()))
    if torch.version.cuda and oldest < FIRST_WITH_BF16:
        raise Limit(f"emulated, and slow, on compute capability {oldest[0]}.{oldest[1]}", "give --fp16 instead")
    return "works: --bf16"


def attention(device: str) -> str:
    """Which of torch's fused kernels take softmax attention, in fp16."""
    usual, megas = (
        [name for name, kernel in KERNELS.items() if kernel_runs(device, kernel, *widths)]
        for widths in (USUAL_WIDTHS, MEGA_WIDTHS)
    )
    found = f"{' and '.join(usual) or 'none'}; for Mega's widths {' and '.join(megas) or 'none'}"
    if not megas:
        raise Limit(found)
    return found


def kernel_runs(device: str, kernel: str, keys: int, values: int) -> bool:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = (
        torch.ones(1, 1, 128, width, device=device, dtype=torch.float16, requires_grad=True)
        for width in (keys, keys, values)
    )
    try:
        with sdpa_kernel([getattr(SDPBackend, kernel)]):
            torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
    except RuntimeError:
        return False
    return True


# --------------------------------------------------------------------------------------------------- CPUs


def bf16_on_cpu() -> str:
    product("cpu", "bfloat16")
    return "works: --bf16"


def fp16_on_cpu() -> str:
    """The format itself works; what fairseq makes of it there does not."""
    product("cpu", "float16")
    raise Limit("fairseq's --fp16 asks for a GPU", "on CPUs give --bf16, --amp or --memory-efficient-fp16")


def processes() -> str:
    """A group of one, over the network that several would use."""
    import torch
    from torch import distributed

    if not distributed.is_available():
        raise Trouble("this torch is built without them")
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        distributed.all_reduce(torch.ones(1))
    finally:
        distributed.destroy_process_group()
    nccl = "nccl is here for GPUs" if distributed.is_nccl_available() else "no nccl"
    raise Limit(
        f"gloo works, {nccl}; fairseq's pytorch_ddp takes no CPUs",
        "on CPUs give --ddp-backend legacy_ddp",
    )


CHECKS = [
    Check("CPUs", cpus, "set OMP_NUM_THREADS", after=("torch",)),
    Check("memory", memory, "take a smaller model, or lower --max-tokens"),
    Check("GPU", gpu, "train small models on the CPU", after=("torch",)),
    Check("fp16 on the GPU", fp16_on_gpus, "train without --fp16", after=("GPU",)),
    Check("bf16 on the GPU", bf16_on_gpus, "train without --bf16", after=("GPU",)),
    Check(
        "fused attention", partial(attention, "cuda"), "chunks (--decoder-chunk-size) bound its memory", after=("GPU",)
    ),
    Check("bf16 on the CPU", bf16_on_cpu, "train without --bf16", after=("torch",)),
    Check("fp16 on the CPU", fp16_on_cpu, "train without --fp16", after=("torch",)),
    Check("several processes", processes, "train in one process", after=("torch",)),
]
