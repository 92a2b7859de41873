"""Helpers of the operators' tests: gradients by name, tensors created by an operator, tensors saved for backward."""

from typing import Callable, Dict, List

import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64, grad: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(grad)


def with_gradients(function: Callable[..., object], inputs: Dict[str, Tensor], seed: int = 99) -> Dict[str, Tensor]:
    """The outputs of function(**inputs) and the gradients of a random linear function of them, by name."""
    outputs = function(**inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    loss = sum((y * noise(*y.shape, seed=seed + i, dtype=y.dtype)).sum() for i, y in enumerate(outputs))
    wanted = {name: t for name, t in inputs.items() if isinstance(t, Tensor) and t.requires_grad}
    grads = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
    results = {f"output {i}": y.detach() for i, y in enumerate(outputs)}
    return {**results, **{f"gradient of {name}": g for name, g in zip(wanted, grads)}}


def assert_same(ours: Dict[str, Tensor], truth: Dict[str, Tensor], rtol: float = 1e-9, atol: float = 1e-10) -> None:
    """Checks that names are equal, and values to about the precision of float64."""
    assert ours.keys() == truth.keys()
    for name, value in truth.items():
        mine, value = (torch.zeros(()) if t is None else t for t in (ours[name], value))
        assert_close(mine, value, name, rtol, atol)


def assert_close(ours: Tensor, truth: Tensor, name: str = "", rtol: float = 1e-9, atol: float = 1e-10) -> None:
    torch.testing.assert_close(ours, truth, rtol=rtol, atol=atol, msg=lambda text: f"{name}: {text}")


def relative_error(y: Tensor, truth: Tensor) -> float:
    """Root mean square of the error divided by that of the truth."""
    return ((y.double() - truth).square().mean() / truth.square().mean()).sqrt().item()


class Recorder(TorchDispatchMode):
    """Records all tensors created in forward and backward, except views and in-place results, and counts launches."""

    def __init__(self):
        super().__init__()
        self.largest = 0  # entries
        self.total = 0  # entries of all tensors together
        self.exponentials = 0  # entries that went through exp or pow
        self.launches = 0  # operations that write to memory, but not those that consist of others
        self.traffic = 0  # bytes that they read and write

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.name() in OPDEFS:  # an operator of this package: record what it does inside
            with self:
                return OPDEFS[func.name()]._init_fn(*args, **(kwargs or {}))
        result, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
        read = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        given = {_storage(t) for t in read}
        made = [t for t in tree_leaves(result) if isinstance(t, Tensor) and t.numel() and _storage(t) not in given]
        for t in made:
            self.largest = max(self.largest, t.numel())
            self.total += t.numel()
        if name.rstrip("_") in ("exp", "exp2", "pow"):
            self.exponentials += result.numel()
        if (made or name.endswith("_")) and "empty" not in name:  # not a view
            self.launches += 1
            self.traffic += sum(t.nbytes for t in (made if name.startswith("new_") else [*made, *read]))
        return result


def _storage(t: Tensor) -> int:
    """Identifies the storage of a tensor; weights packed for the CPU have no address."""
    return t.untyped_storage().data_ptr() if t.layout is torch.strided else id(t)


def kept_for_backward(function: Callable[[], object]) -> List[int]:
    """Entries of each tensor that a forward pass keeps for its backward pass, each storage once."""
    kept: Dict[int, Tensor] = {}

    def pack(t: Tensor) -> Tensor:
        kept[t.untyped_storage().data_ptr()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        function()
    return [t.untyped_storage().nbytes() // t.element_size() for t in kept.values()]
