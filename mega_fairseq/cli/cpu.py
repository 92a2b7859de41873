"""What makes training on this CPU faster: bf16, and memory that the C library keeps."""

import os
import platform
import subprocess
import sys
import time

GLIBC = platform.libc_ver()[0] == "glibc"
WORTH_SETTING = 1.05  # speed of an output layer
WORTH_IT = 1.5  # speed of matrix products in bf16 relative to float32; the rest of a layer does not become faster
# glibc then keeps freed memory for the next update; otherwise the kernel clears its pages again in each one. It reads
# them when a process starts. It is the same with MALLOC_MMAP_THRESHOLD_, but older versions ignore large ones.
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "100000000000"}
UPDATE = """
import time, timeit, torch
torch.set_num_threads(1)
features, weight = torch.ones(4096, 128), torch.ones(4000, 128, requires_grad=True)
update = lambda: (features @ weight.t()).log_softmax(1).sum().backward()
print(min(timeit.repeat(update, timer=time.thread_time, number=1, repeat=4)))
"""


class Limit(Exception):
    """A restriction, or a version that was not tested, with its remedy."""


def cpu_bf16() -> str:
    """Newer CPUs multiply bf16 in hardware; others convert each number first."""
    ratio = product_seconds("float32") / product_seconds("bfloat16")
    text = f"the CPU multiplies matrices {ratio:.2f} times as fast in bf16 as in float32"
    if ratio < WORTH_IT:
        raise Limit(f"{text}; on the CPU, train in float32")
    return f"{text}, so --bf16 makes training on it faster"


def product_seconds(dtype: str) -> float:
    """CPU time of one thread for a product of two square matrices."""
    import torch
    from torch.utils.benchmark import Timer

    matrix = torch.ones(512, 512, dtype=getattr(torch, dtype))
    return Timer("matrix @ matrix", globals={"matrix": matrix}, timer=time.thread_time).timeit(8).mean


def kept_memory() -> str:
    """What KEEP_MEMORY gains where a translator has its largest tensors."""
    gain = update_seconds() / update_seconds(**KEEP_MEMORY)
    text = f"on the CPU, a translator's output layer trains {gain:.2f} times as fast if freed memory is kept"
    if all(os.environ.get(name) == value for name, value in KEEP_MEMORY.items()):
        return f"{text}, as it is here"
    if gain < WORTH_SETTING:
        return text
    raise Limit(f"{text}; export {' '.join(map('='.join, KEEP_MEMORY.items()))}")


def update_seconds(**settings: str) -> float:
    """CPU time of a training step in a new process with these settings of the C library and no others."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    words, environment = [sys.executable, "-c", UPDATE], {**environment, **settings}
    return float(subprocess.run(words, env=environment, check=True, capture_output=True, text=True).stdout)
