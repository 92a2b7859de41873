"""Blocks whose sequences are divided over processes: `share_sequences` turns an ordinary block into one.

Attention in chunks needs nothing of other slices if slices are cut at the borders of chunks. A `Recurrence` gets a twin
with the same parameters, which first computes the state that enters this process's slice. Other recurrences, among them
token shift and the window of a truncated EMA, are refused.
"""

from functools import lru_cache
from typing import Any, NamedTuple, Optional, Tuple, Type

from torch import Tensor, nn

from mega_fairseq.modules.block import Block, BlockState
from mega_fairseq.modules.layer import Recurrence
from mega_fairseq.modules.mixer import ChunkedMixer
from mega_fairseq.ops.padding import Padding
from mega_fairseq.ops.sequence_parallel import Slices


class SequenceParallelState(NamedTuple):
    """The state of a block that gets one slice of each sequence, without pads.

    The block returns the ordinary state after all slices, which is only valid if all have full width.
    """

    slices: Slices
    state: Optional[BlockState] = None  # before all slices, the same in all processes


class Exchange:
    """Tells the recurrences of a block which slices of sequences this forward pass has; None for whole sequences."""

    slices: Optional[Slices] = None


class SequenceParallelBlock(Block):
    """A block that also takes a `SequenceParallelState`."""

    exchange: Exchange

    def forward(self, x: Tensor, state: object = None, *arguments, **options):
        if not isinstance(state, SequenceParallelState):
            return super().forward(x, state, *arguments, **options)
        self.exchange.slices, state = state
        try:
            return super().forward(x, state, *arguments, **options)
        finally:
            self.exchange.slices = None


class InSlices:
    """A mixin for a `Recurrence`, which then also takes slices of sequences and the state before all slices."""

    exchange: Exchange

    def forward(self, x: Tensor, state: Any = None, padding_mask: Optional[Padding] = None) -> Tuple[Tensor, Any]:
        if self.exchange.slices is None:
            return super().forward(x, state, padding_mask)
        state, after = self.entering(x, state, self.exchange.slices)
        return super().forward(x, state)[0], after


@lru_cache(maxsize=None)
def _twin(kind: Type[nn.Module]) -> Type[nn.Module]:
    return SequenceParallelBlock if kind is Block else type(f"SequenceParallel{kind.__name__}", (InSlices, kind), {})


def share_sequences(block: Block) -> None:
    """Lets a causal block take slices of sequences, in `SequenceParallelState`, with the same parameters as before.

    Raises ValueError if it carries more along the sequence than states that compose, or its attention has no chunks.
    """
    mixer, c = block.mixer, block.mixer.config
    exchanged = any(isinstance(module, Recurrence) and module.composes for module in mixer.modules())
    carried = [path for path in mixer.state_shapes() if not (exchanged or path.endswith((".keys", ".values")))]
    if c.token_shift or block.shifts_feed_forward:
        carried.append("the last token, for token shift")
    if carried:
        raise ValueError(f"processes cannot exchange {carried[0]}, of this model; give one process for each sequence")
    if isinstance(mixer, ChunkedMixer) and c.chunk_size is None:
        name = c.name("chunk_size")
        raise ValueError(
            f"{name} is {c.written(None)}, and processes can share a sequence only if attention stays in chunks; give "
            f"{name}, such as 2048, or one process for each sequence"
        )
    exchange = Exchange()
    for module in block.modules():
        if type(module) is Block or (isinstance(module, Recurrence) and not isinstance(module, InSlices)):
            module.__class__, module.exchange = _twin(type(module)), exchange
