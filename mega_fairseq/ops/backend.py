"""Chooses the form in which operators run: their definition, plain torch, or Triton kernels."""

import logging
import os
from functools import lru_cache
from typing import Any, Optional, Tuple

import torch

logger = logging.getLogger(__name__)

NAIVE, CPU, TRITON = BACKENDS = ("naive", "cpu", "triton")
CAPABILITY = (8, 0)  # the first GPUs that compute in bfloat16


def backend(device: torch.device) -> str:
    """Returns the form for tensors on this device: "triton" on NVIDIA GPUs where it works, otherwise "cpu".

    The environment variable MEGA_BACKEND overrides the choice, for debugging.
    """
    return _choose(device)


# What torch.compiler.assume_constant_result sets; it would also import the compiler, which takes a second.
backend._dynamo_marked_constant = True


@lru_cache(maxsize=None)
def _choose(device: torch.device) -> str:
    chosen = os.environ.get("MEGA_BACKEND")
    if chosen:
        if chosen not in BACKENDS:
            raise ValueError(f"MEGA_BACKEND is {chosen!r}; use one of {', '.join(BACKENDS)}, or unset it")
        if chosen == TRITON and device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            raise ValueError("MEGA_BACKEND is 'triton', whose kernels need a GPU, and tensors are on the CPU; unset it")
    elif device.type != "cuda":
        chosen = CPU
    else:
        reason = why_no_kernels(device)
        chosen = CPU if reason else TRITON
        if reason:
            logger.warning("Mega's layers are slower, since Triton's kernels do not run here: %s", reason)
    logger.info("operators on %s run in the form %r", device, chosen)
    return chosen


def why_no_kernels(device: torch.device) -> Optional[str]:
    """Returns why Triton cannot run on this device, or None; runs a kernel to find out."""
    if torch.version.hip is not None:
        return "they were not tested on AMD GPUs"
    try:
        import triton  # here, since torch brings it only with CUDA on Linux

        if torch.cuda.get_device_capability(device) < CAPABILITY:
            return f"the GPU is older than compute capability {'.'.join(map(str, CAPABILITY))}"
        with torch.cuda.device(device):
            triton.jit(_nothing)[(1,)]()
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:  # no Triton, no C compiler, or a GPU that it does not know
        return "{}: {}".format(type(error).__name__, str(error).strip().partition("\n")[0])
    return None


def _nothing():
    """A kernel without arguments, so that it also runs while torch.export replaces all tensors by fake ones."""


def launch(kernel: Any, grid: Tuple[int, ...], *args: Any, **options: Any) -> None:
    """Launches a kernel on the device of its first argument, a tensor. A product and a sum are one operation there."""
    with torch.cuda.device_of(args[0]):
        kernel[grid](*args, **options, enable_fp_fusion=True)
