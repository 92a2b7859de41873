"""Whether Triton's kernels run for a tensor, and how they are launched."""

import warnings
from functools import lru_cache
from typing import Any, Optional, Tuple

import torch
from torch import Tensor

from mega_fairseq.ops.precision import is_compiling

TESTED = (3, 6)  # of Triton, which came with torch 2.11
CAPABILITY = (8, 0)  # the first GPUs that compute in bfloat16


def kernels_run(x: Tensor) -> bool:
    """On NVIDIA GPUs where Triton works, and not while torch.compile traces: it fuses the plain forms itself."""
    return x.is_cuda and not is_compiling() and _work(x.device)


def launch(kernel: Any, grid: Tuple[int, int], *given: Any, **options: Any) -> None:
    """Launches a kernel on the device of its first argument, a tensor. A product and a sum are one operation there."""
    with torch.cuda.device_of(given[0]):
        kernel[grid](*given, **options, enable_fp_fusion=True)


@lru_cache(maxsize=None)
def _work(device: torch.device) -> bool:
    reason = why_no_kernels(device)
    if reason is not None:
        warnings.warn(f"Mega's layers are slower, since Triton's kernels do not run here: {reason}", stacklevel=2)
    return reason is None


def why_no_kernels(device: torch.device) -> Optional[str]:
    """The reason why Triton's kernels do not run on this device, or None if they do, which is tried."""
    if torch.version.hip is not None:
        return "they were not tested on AMD GPUs"
    try:
        import triton  # here, since torch brings it only with CUDA on Linux

        if tuple(map(int, triton.__version__.split(".")[:2])) < TESTED:
            return f"Triton {triton.__version__} is older than {'.'.join(map(str, TESTED))}"
        if torch.cuda.get_device_capability(device) < CAPABILITY:
            return f"the GPU is older than compute capability {'.'.join(map(str, CAPABILITY))}"
        from mega_fairseq.ops.ema.triton import triton_ema

        triton_ema(torch.zeros(1, 1, 1, device=device), torch.zeros(4, 1, 1, 1, device=device))
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:  # no Triton, no C compiler, or a GPU that it does not know
        return "{}: {}".format(type(error).__name__, str(error).strip().partition("\n")[0])
    return None
