"""The state of a decoder between steps, and how it follows the beams.

A beam search gives every row the state of the row that it continues. Most of the state of two rows is common to both:
the tokens from before they parted. Only what came after is copied, in place; and all beams of a sentence share one
projection of its source.
"""

from typing import NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from mega_fairseq.modules import BlockState, BlockStep
from mega_fairseq.modules.mixer import batch_size
from mega_fairseq.ops.linear import Projection


class Ready(NamedTuple):
    """The weights prepared for single tokens: a copy that lives as long as one generation."""

    blocks: Tuple[BlockStep, ...]
    output: Optional[Projection]  # None for an adaptive softmax, which takes features


class DecoderState(NamedTuple):
    blocks: Tuple[BlockState, ...]
    length: int  # tokens seen
    shared: Optional[Tensor] = None  # (S, b, b) on the CPU: first tokens that two beams of a sentence have in common
    ready: Optional[Ready] = None


class Move(NamedTuple):
    """What an order of rows means: rows of one sentence stand together, b of them, before and after."""

    order: Tensor  # (R',) the row that each row continues
    last: Optional[int]  # rows differ from those they continue in their last tokens alone; None where in any
    sources: Optional[Tensor]  # (S',) the sources that are left; where rows are mixed up, of each row; None for all
    shared: Optional[Tensor]


def reorder(state: DecoderState, order: Tensor, alike: bool = True) -> DecoderState:
    """Row i continues row order[i]; fewer rows than before where sentences are finished.

    The caller owns `state` and gives it up: its caches are written over. With dropout in generation, rows are not
    `alike`: those of the same tokens have other states.
    """
    rows = batch_size(state.blocks[0].mixer)
    chosen = order.cpu()
    if torch.equal(chosen, torch.arange(rows)):
        return state
    move = _move(state, order, chosen, rows, alike)
    return state._replace(blocks=tuple(past.follow(*move[:3]) for past in state.blocks), shared=move.shared)


def _move(state: DecoderState, order: Tensor, chosen: Tensor, rows: int, alike: bool) -> Move:
    if state.blocks[0].cross is None:  # no source tells which rows are of one sentence
        return Move(order, None, None, None)
    sources = state.blocks[0].cross.sources
    beams = rows // sources
    sentence = chosen // beams
    if chosen.numel() % beams or not torch.equal(sentence, sentence[::beams].repeat_interleave(beams)):
        return Move(order, None, sentence.to(order.device), None)
    kept = sentence[::beams]  # (S',)
    beam = (chosen % beams).view(-1, beams)  # (S', b) which beam of its sentence each one continues
    shared = torch.zeros(sources, beams, beams, dtype=torch.long) if state.shared is None else state.shared
    common = shared[kept].gather(1, beam.unsqueeze(2).expand(-1, -1, beams))  # of each row's parent with every beam
    last, left = None, kept.to(order.device)
    if torch.equal(kept, torch.arange(sources)):
        with_parent = common.diagonal(dim1=1, dim2=2)  # of the parent with the row that was in its place before
        moved = beam != torch.arange(beams)
        last, left = state.length - int(with_parent[moved].min()), None
    shared = common.gather(2, beam.unsqueeze(1).expand(-1, beams, -1))
    if alike:
        shared = shared.masked_fill(beam.unsqueeze(2) == beam.unsqueeze(1), state.length)  # siblings share everything
    return Move(order, last, left, shared)
