"""The state of a decoder between steps, and how beam search reorders it.

Beam search replaces the state of each row by that of the row that it continues. Two beams of a sentence share all
tokens from before they diverged, so only later tokens are copied, in place. All beams of a sentence share one
projection of its source.
"""

from typing import Callable, Iterable, NamedTuple, Optional, Tuple

import torch
from torch import Tensor, nn

from mega_fairseq.modules import BlockState, BlockStep
from mega_fairseq.modules.mixer_state import batch_size
from mega_fairseq.ops.linear import Projection


class Ready(NamedTuple):
    """The weights prepared for single tokens: a copy."""

    blocks: Tuple[BlockStep, ...]
    output: Optional[Projection]  # None for an adaptive softmax, which takes features


class ReadyOnce:
    """Keeps prepared weights for as long as the parameters are unchanged. Copies and pickles of it are empty.

    It is only for models that are no longer trained: writing to a parameter's `.data` does not change its version, so a
    few numbers are compared, which shows when other weights were copied into it.
    """

    def __init__(self):
        self.made: Optional[Tuple[Tuple, Tensor, Ready]] = None  # replaced as a whole: threads may share it

    def get(self, parameters: Iterable[nn.Parameter], prepare: Callable[[], Ready]) -> Ready:
        current = list(parameters)
        version = tuple((p.data_ptr(), p.dtype, None if p.is_inference() else p._version) for p in current)
        numbers = torch.cat([p.detach().flatten()[:: 1 + p.numel() // 8].double() for p in current])
        made = self.made
        if made is None or made[0] != version or not torch.equal(made[1], numbers):
            made = self.made = (version, numbers, prepare())
        return made[2]

    def __reduce__(self) -> Tuple:
        return ReadyOnce, ()


class DecoderState(NamedTuple):
    blocks: Tuple[BlockState, ...]
    length: int  # tokens seen
    shared: Optional[Tensor] = None  # (S, b, b) on the CPU: number of first tokens that two beams of a sentence share
    ready: Optional[Ready] = None

    def __reduce__(self) -> Tuple:
        return DecoderState, (self.blocks, self.length, self.shared)  # the next step prepares again what is `ready`


class Move(NamedTuple):
    """How an order changes the state; the b rows of a sentence are consecutive, before and after."""

    order: Tensor  # (R',) the row that each new row continues
    last: Optional[int]  # number of last tokens in which rows may differ from those they continue; None if all
    sources: Optional[Tensor]  # (S',) the sources that remain, or that of each row if sentences are mixed; None for all
    shared: Optional[Tensor]


def reorder(state: DecoderState, order: Tensor, alike: bool = True) -> DecoderState:
    """Replaces row i by row order[i]; there are fewer rows than before if sentences are finished.

    `state` must not be used afterwards, since its caches are overwritten. With dropout in generation, rows are not
    `alike`: those of the same tokens have other states.
    """
    rows = batch_size(state.blocks[0].mixer)
    chosen = order.cpu()
    if torch.equal(chosen, torch.arange(rows, device="cpu")):
        return state
    move = _move(state, order, chosen, rows, alike)
    return state._replace(blocks=tuple(past.follow(*move[:3]) for past in state.blocks), shared=move.shared)


def _move(state: DecoderState, order: Tensor, chosen: Tensor, rows: int, alike: bool) -> Move:
    if state.blocks[0].cross is None:  # without a source, the sentence of a row is unknown
        return Move(order, None, None, None)
    sources = state.blocks[0].cross.keys.size(0)
    beams = rows // sources
    sentence = chosen // beams
    if chosen.numel() % beams or not torch.equal(sentence, sentence[::beams].repeat_interleave(beams)):
        return Move(order, None, sentence.to(order.device), None)
    kept = sentence[::beams]  # (S',)
    beam = (chosen % beams).view(-1, beams)  # (S', b) which beam of its sentence each one continues
    shared = state.shared
    if shared is None:
        shared = torch.zeros(sources, beams, beams, dtype=torch.long, device="cpu")
    common = shared[kept].gather(1, beam.unsqueeze(2).expand(-1, -1, beams))  # by the parent and each beam
    if torch.equal(kept, torch.arange(sources, device="cpu")):
        with_parent = common.diagonal(dim1=1, dim2=2)  # shared by the parent and the previous row at this position
        moved = beam != torch.arange(beams, device="cpu")
        last, left = state.length - int(with_parent[moved].min()), None
    else:
        last, left = None, kept.to(order.device)
    shared = common.gather(2, beam.unsqueeze(1).expand(-1, beams, -1))
    if alike:
        shared = shared.masked_fill(beam.unsqueeze(2) == beam.unsqueeze(1), state.length)  # the same parent
    return Move(order, last, left, shared)
