"""Sequences divided over processes: each process of a group has one slice of every sequence in a batch.

A causal layer with a recurrence needs only the state of the slices before its own. Each process reduces its slice to
the state from zero, all exchange these states in one all-gather, and each composes the state that enters its slice. For
an EMA with decay phi and slices of L tokens:

    h_r = sum over j < r of phi^(L (r - 1 - j)) own_j        enters slice r

In backward, gradients of these states go back in one all-to-all. Both send the size of one state to each other process.
All that compose states read what was gathered in every process, the first one too: otherwise its backward would not
take part, and the others would wait for it. `modules/sequence_parallel.py` applies this to the layers of a block.
"""

from typing import Any, Dict, NamedTuple, Optional, Tuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mega_fairseq.ops.block_scan import state_after
from mega_fairseq.ops.precision import at_least_float32, without_autocast
from mega_fairseq.ops.timestep_norm import Statistics, merged, statistics


class SequenceGroup:
    """The processes that share every sequence, in the order of their slices; by default all processes."""

    def __init__(self, group: Optional["dist.ProcessGroup"] = None):
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)

    def __deepcopy__(self, memo: Dict[int, Any]) -> "SequenceGroup":
        return self  # the copy of a model shares sequences with the same processes

    def divide(self, length: int, unit: int) -> "Slices":
        """Slices of equal width, a multiple of `unit`; only the last ones may be shorter, or empty."""
        units = -(-length // unit)
        return Slices(self, length, -(-units // self.size) * unit)

    def all_gather(self, state: Tensor) -> Tensor:
        """(...) -> (S, ...), without gradients."""
        every = state.new_empty(self.size, *state.shape)
        dist.all_gather(list(every), state.contiguous(), self.group)
        return every

    def all_to_all(self, parts: Tensor) -> Tensor:
        """Part i of (S, ...) goes to process i -> the parts (S, ...) from all processes, without gradients."""
        received = torch.empty_like(parts, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, parts.contiguous(), group=self.group)
        return received


class Slices(NamedTuple):
    """One slice of `length` tokens for each process of a group."""

    group: SequenceGroup
    length: int
    width: int  # tokens of each slice but the last ones

    @property
    def rank(self) -> int:
        """The index of the slice of this process."""
        return self.group.rank

    @property
    def bounds(self) -> Tuple[int, int]:
        """Start and end of this process's slice."""
        start, stop = ((self.rank + i) * self.width for i in (0, 1))
        return min(start, self.length), min(stop, self.length)

    def gather(self, state: Tensor) -> Tensor:
        """The states of all slices, (S, ...) in float32 or better; every process must use them in backward."""
        return _Gather.apply(state.to(at_least_float32(state.dtype)), self.group)

    def join(self, columns: Tensor) -> Tensor:
        """Columns of this slice, (B, width of the slice, ...) -> columns of all slices, (B, length, ...).

        All processes must compute the same loss from the result, so that the gradient of a process's columns is already
        complete there.
        """
        missing = self.width - columns.size(1)
        padded = F.pad(columns.detach(), (0, 0) * (columns.dim() - 2) + (0, missing))
        every = self.group.all_gather(padded).transpose(0, 1).flatten(1, 2)  # (B, S width, ...)
        start, stop = self.bounds
        return torch.cat([every[:, :start], columns, every[:, stop : self.length]], 1)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, state, group):
        ctx.group = group
        return group.all_gather(state)

    @staticmethod
    def backward(ctx, gradient):
        if torch.is_grad_enabled():
            raise RuntimeError("sequence parallelism has no second derivatives")
        return ctx.group.all_to_all(gradient).sum(0), None


def entering_state(x: Tensor, c: Any, slices: Slices, before: Optional[Tensor] = None) -> Tuple[Tensor, Tensor]:
    """States of a linear recurrence on slices x (B, L, D): before this process's slice, and after all slices.

    `c` are its coefficients, as in `ops/block_scan`. `before` is the state before all slices, the same in every
    process. The state after all of them is valid if the last one has full width.
    """
    with without_autocast(x):
        # Keeps no copy of x for backward, and computes no outputs.
        every = slices.gather(
            checkpoint(state_after, x, c, use_reentrant=False, preserve_rng_state=False)
        )  # (S, B, ..)

        def after(count: int) -> Tensor:
            later = slices.width * torch.arange(count - 1, -1, -1, device=x.device)  # tokens
            total = c.decayed(every[:count], later.view(-1, 1, 1, 1)).sum(0)
            return total if before is None else total + c.decayed(before, count * slices.width)

        return after(slices.rank), after(slices.group.size)


def entering_statistics(x: Tensor, groups: int, slices: Slices, before: Statistics) -> Tuple[Statistics, Statistics]:
    """The same for the statistics of a timestep norm: before this process's slice, and after all slices."""
    _, *own = checkpoint(statistics, x, groups, use_reentrant=False, preserve_rng_state=False)
    every = slices.gather(torch.stack(own))  # (S, 2, B, G)

    def after(count: int) -> Statistics:
        means, spreads = every[:count].unbind(1)
        mean = means.sum(0) / max(1, count)  # of slices of equal width
        var = (spreads + (means - mean).square()).sum(0) / max(1, count)
        return merged(before, Statistics(torch.full_like(before.count, count * slices.width), mean, var))

    return after(slices.rank), after(slices.group.size)
