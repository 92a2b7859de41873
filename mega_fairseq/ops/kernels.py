"""Whether Triton's kernels run for a tensor."""

import warnings
from functools import lru_cache
from typing import Optional

import torch
from torch import Tensor

from mega_fairseq.ops.precision import is_compiling


def kernels_run(x: Tensor) -> bool:
    """On NVIDIA GPUs where Triton works, and not while torch.compile traces: it fuses the plain forms itself."""
    return x.is_cuda and not is_compiling() and _work(x.device)


@lru_cache(maxsize=None)
def _work(device: torch.device) -> bool:
    reason = why_no_kernels(device)
    if reason is not None:
        warnings.warn(f"Mega's layers are slower, since Triton's kernels do not run here: {reason}", stacklevel=2)
    return reason is None


def why_no_kernels(device: torch.device) -> Optional[str]:
    """Tries a kernel: Triton may be missing, find no C compiler, or not know the GPU."""
    if torch.version.hip is not None:
        return "they were not tested on AMD GPUs"
    try:
        from mega_fairseq.ops.ema_triton import triton_ema  # here, since torch brings Triton only with CUDA on Linux

        triton_ema(torch.zeros(1, 1, 1, device=device), torch.zeros(4, 1, 1, 1, device=device))
    except Exception as error:
        return "{}: {}".format(type(error).__name__, str(error).strip().partition("\n")[0])
    return None
