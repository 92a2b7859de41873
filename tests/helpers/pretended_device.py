"""A device other than the CPU, simulated on the CPU: finds tensors on the wrong device, and where the host waits.

    with PretendedDevice() as device:
        model, tokens = moved(model), moved(tokens)
        device.waits.clear()
        model(tokens)
    device.waits  # ["aten::_local_scalar_dense", ...]

Its tensors report torch's "meta" device, so that code takes the form that it has for a GPU, but they have values, which
are in a tensor on the CPU. An operation on tensors of both devices raises an error, as on a GPU, and with
`float64=False` any tensor in float64, as on Apple's GPUs.
"""

from contextlib import ExitStack
from typing import Any, Dict, List

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("meta")
# The host waits for a GPU at an operation whose result is a number, or has a shape that depends on values.
WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "unique", "_unique2", "unique_consecutive")


class _There(Tensor):
    """A tensor of the pretended device."""

    @staticmethod
    def __new__(cls, on_cpu: Tensor):
        layout = {"strides": on_cpu.stride(), "storage_offset": on_cpu.storage_offset()}
        return Tensor._make_wrapper_subclass(cls, on_cpu.shape, dtype=on_cpu.dtype, device=DEVICE, **layout)

    def __init__(self, on_cpu: Tensor):
        self.on_cpu = on_cpu

    def data_ptr(self) -> int:
        return self.on_cpu.data_ptr()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.on_cpu.untyped_storage()

    def __repr__(self) -> str:
        return f"_There({self.on_cpu})"

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} ran outside of PretendedDevice")


class _FromNumbers(TorchFunctionMode):
    """Makes tensors from Python numbers on the CPU and copies them, as for a GPU; on "meta", torch makes empty ones."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is Tensor.new_tensor:
            func, args, kwargs = torch.tensor, args[1:], {"dtype": args[0].dtype, "device": args[0].device, **kwargs}
        if func not in (torch.tensor, torch.as_tensor) or kwargs.get("device") is None:
            return func(*args, **kwargs)
        if isinstance(args[0], Tensor):
            return args[0].to(**kwargs)
        device = kwargs.pop("device")
        return func(*args, **kwargs).to(device)


class PretendedDevice(TorchDispatchMode):
    """Runs operations of DEVICE on the CPU; `waits` are the names of those at which the host would wait for a GPU."""

    def __init__(self, float64: bool = True):
        super().__init__()
        self.float64 = float64
        self.waits: List[str] = []
        self.modes = ExitStack()

    def __enter__(self) -> "PretendedDevice":
        self.modes.enter_context(_FromNumbers())
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.modes.close()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, name = dict(kwargs or {}), func.overloadpacket.__name__
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        there = [t for t in given if isinstance(t, _There)]
        here = [t for t in given if not isinstance(t, _There)]
        to = kwargs.get("device")
        result_there = bool(there) if to is None else to.type == DEVICE.type
        if to is not None:
            kwargs["device"] = torch.device("cpu")
        copies = name in ("copy_", "_to_copy")
        if there and any(t.dim() for t in here) and not copies:  # numbers may be on either
            raise AssertionError(f"{func} has tensors of the CPU and of another device")
        if copies and (there and not result_there or here and result_there) or there and _waits(name, args):
            self.waits.append(func.overloadpacket._qualified_op_name)
        args, kwargs = tree_map(lambda t: t.on_cpu if isinstance(t, _There) else t, (args, kwargs))
        known = {id(t.on_cpu): t for t in there}  # an operation in place returns the tensor that it was given

        def wrapped(t: Any) -> Any:
            if not isinstance(t, Tensor) or not result_there:
                return t
            if t.dtype == torch.float64 and not self.float64:
                raise TypeError(f"{func} makes a tensor in float64, which this device does not have")
            return known[id(t)] if id(t) in known else _There(t)

        return tree_map(wrapped, func(*args, **kwargs))


def _waits(name: str, args: Any) -> bool:
    if name in ("index", "index_put", "index_put_"):  # by a mask
        return any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1])
    return name in WAITS or name == "repeat_interleave"  # by a tensor of counts


def moved(value: Any) -> Any:
    """A tensor, a module (in place) or a container of tensors on DEVICE; shared parameters remain shared."""
    if isinstance(value, dict):
        return {name: moved(part) for name, part in value.items()}
    if isinstance(value, Tensor):
        return value.to(DEVICE)
    if not isinstance(value, nn.Module):
        return value
    made: Dict[Tensor, Tensor] = {}
    for part in value.modules():
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and tensor not in made:
                    there = tensor.detach().to(DEVICE)
                    parameter = isinstance(tensor, nn.Parameter)
                    made[tensor] = nn.Parameter(there, tensor.requires_grad) if parameter else there
                tensors[name] = None if tensor is None else made[tensor]
    return value
