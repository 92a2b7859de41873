"""Stands in for CUDA graphs on a CPU: records the operations of steps, and replays them in the same memory.

Like a graph, a replay runs no Python of the step and sees no other tensors than those of the capture, and a capture
fails at an operation for which the host waits.
"""

from functools import partial
from typing import Any, Callable, List, Sequence, Tuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.helpers.pretended_device import WAITS


class _Recorder(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls: List[Tuple] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Tuple = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in WAITS:
            raise RuntimeError(f"{func} is not possible while a graph is captured")
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out


def recorded(steps: Sequence[Callable[[], None]], pool: Any = None) -> List[Callable[[], None]]:
    """Has the interface of `cuda_graphs`."""
    for step in steps:
        step()
    replays = []
    for step in steps:
        with _Recorder() as recorder:
            step()
        replays.append(partial(_replay, recorder.calls))
    return replays


@torch.no_grad()
def _replay(calls: List[Tuple]) -> None:
    for func, args, kwargs, out in calls:
        for old, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs))):
            if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():  # otherwise a view, or in place
                old.copy_(new)


class Operations(TorchDispatchMode):
    """Counts operations other than views, outside of replays; `capture` has the interface of `cuda_graphs`."""

    count, replays = 0, False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not self.replays and not func.is_view
        return func(*args, **(kwargs or {}))

    def capture(self, steps, pool=None):
        def uncounted(replay):
            self.replays = True
            replay()
            self.replays = False

        return [partial(uncounted, replay) for replay in recorded(steps)]
