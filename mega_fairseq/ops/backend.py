"""Chooses the form in which operators run: their definition, plain torch, or Triton kernels."""

import logging
import os
from functools import lru_cache
from importlib import import_module
from types import ModuleType
from typing import Any, Callable, Optional, Sequence, Tuple

import torch
from torch import Tensor

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


class Forms:
    """A function in several forms, which have the same arguments and results: a call runs one of them.

    The device of the first tensor among the arguments decides. `naive` is the definition; `cpu` the form in plain
    torch, by default the definition. `triton` names the form by Triton kernels, "module:function", which runs where
    kernels do, for arguments of which `suits` is true, by default for all; otherwise `cpu` runs there too.

    Forms may also be modules, which contain parts of an operator: `triton` is then the name of a module. `of` returns
    the one for a tensor.
    """

    def __init__(
        self,
        naive: Any,
        cpu: Any = None,
        triton: Optional[str] = None,
        suits: Callable[..., bool] = lambda *args, **options: True,
    ):
        self.naive, self.cpu, self.triton, self.suits = naive, naive if cpu is None else cpu, triton, suits
        module, _, self.function = (triton or "").partition(":")
        self.kernels: Optional[ModuleType] = None  # the module of Triton kernels, once it is needed

        def choose(device: torch.device) -> str:
            form = backend(device)
            if form != TRITON or self.triton is None:
                return CPU if form == TRITON else form
            if self.kernels is None:  # not before, since Triton may be missing
                self.kernels = import_module(module)
            return form

        # A constant for compilers, as `backend` is. A function cannot be one, so this returns a name.
        choose._dynamo_marked_constant = True
        self._choose = choose

    def __call__(self, *args: Any, **options: Any) -> Any:
        form = self._choose(_first_tensor((*args, *options.values())).device)
        suits = form != TRITON or self.suits(*args, **options)
        return self._named(form if suits else CPU)(*args, **options)

    def of(self, x: Tensor, suits: bool = True) -> Any:
        form = self._choose(x.device)
        return self._named(form if suits or form != TRITON else CPU)

    def _named(self, form: str) -> Any:
        if form != TRITON:
            return self.cpu if form == CPU else self.naive
        return getattr(self.kernels, self.function) if self.function else self.kernels


def without_gradients(*_: Any, **__: Any) -> bool:
    """For `suits` of forms that have no backward pass."""
    return not torch.is_grad_enabled()


def _first_tensor(arguments: Sequence[Any]) -> Tensor:
    for argument in arguments:
        if isinstance(argument, Tensor):
            return argument
    raise TypeError("no argument is a tensor")


def on_cpu(x: Tensor) -> bool:
    """Whether x is on the CPU, where reading numbers and launching operations is cheap, and caches are small."""
    return x.device.type == "cpu"


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
