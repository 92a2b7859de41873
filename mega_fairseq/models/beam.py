"""What a decoder remembers between steps, and how that follows the beams.

A beam search hands every row the memory of the row it continues. Most of what two rows remember is common to both:
they share the tokens from before they parted. Only what came after is copied, in place; and all beams of a sentence
share one projection of its source.
"""

from typing import NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from mega_fairseq.modules import BlockStep, CrossAttentionState, MegaBlockState
from mega_fairseq.ops.chunks import KeyValues
from mega_fairseq.ops.linear import Projection


class Ready(NamedTuple):
    """The weights made ready for single tokens: a copy that lives as long as one generation."""

    blocks: Tuple[BlockStep, ...]
    output: Optional[Projection]  # None for an adaptive softmax, which takes features


class DecoderState(NamedTuple):
    blocks: Tuple[MegaBlockState, ...]
    length: int  # tokens seen
    shared: Optional[Tensor] = None  # (S, b, b) on the CPU: first tokens that two beams of a sentence have in common
    ready: Optional[Ready] = None


class Move(NamedTuple):
    """What an order of rows means: rows of one sentence stand together, b of them, before and after."""

    order: Tensor  # (R',) the row that each row continues
    sources: Tensor  # (S',) the source of each sentence that is left; where rows are mixed up, of each row
    first: Optional[int]  # rows differ in no token before this one from the row they continue; None for other rows
    shared: Optional[Tensor]


def reorder(state: DecoderState, order: Tensor) -> DecoderState:
    """Row i continues row order[i]; fewer rows than before where sentences are finished.

    The caller owns `state` and gives it up: its caches are written over.
    """
    rows = state.blocks[0].mixer.ema.size(0)
    chosen = order.cpu()
    if torch.equal(chosen, torch.arange(rows)):
        return state
    move = _move(state, order, chosen, rows)

    def block(past: MegaBlockState) -> MegaBlockState:
        cache, ema = past.mixer.cache, past.mixer.ema.index_select(0, order)
        before = state.length - cache.keys.size(1)  # the cache holds the last tokens only
        first = None if move.first is None else max(0, move.first - before)
        mixer = past.mixer._replace(ema=ema, cache=_reordered(cache, order, first))
        return MegaBlockState(mixer, _same_sources(past.cross, move))

    return state._replace(blocks=tuple(map(block, state.blocks)), shared=move.shared)


def _move(state: DecoderState, order: Tensor, chosen: Tensor, rows: int) -> Move:
    if state.blocks[0].cross is None:  # no source tells which rows are of one sentence
        return Move(order, order, None, None)
    sources = state.blocks[0].cross.keys.size(0)
    beams = rows // sources
    sentence = chosen // beams
    if chosen.numel() % beams or not torch.equal(sentence, sentence[::beams].repeat_interleave(beams)):
        return Move(order, sentence.to(order.device), None, None)
    kept = sentence[::beams]  # (S',)
    beam = (chosen % beams).view(-1, beams)  # (S', b) which beam of its sentence each one continues
    shared = torch.zeros(sources, beams, beams, dtype=torch.long) if state.shared is None else state.shared
    common = shared[kept].gather(1, beam.unsqueeze(2).expand(-1, -1, beams))  # of each row's parent with every beam
    first = None
    if torch.equal(kept, torch.arange(sources)):
        with_parent = common.diagonal(dim1=1, dim2=2)  # of the parent with who stood in the row before
        moved = beam != torch.arange(beams)
        first = int(with_parent[moved].min())
    shared = common.gather(2, beam.unsqueeze(1).expand(-1, beams, -1))
    shared = shared.masked_fill(beam.unsqueeze(2) == beam.unsqueeze(1), state.length)  # siblings share everything
    return Move(order, kept.to(order.device), first, shared)


def _reordered(cache: KeyValues, order: Tensor, first: Optional[int]) -> KeyValues:
    """Rows of the cache in their new order; given `first`, in place and from that token on."""
    if first is None or cache.padding is not None or cache.keys.requires_grad:
        return KeyValues(*(None if t is None else t.index_select(0, order) for t in cache[:3]))
    for tensor in (cache.keys[:, first:], cache.values[:, first:]):
        tensor.copy_(tensor.index_select(0, order))
    return cache


def _same_sources(cross: Optional[CrossAttentionState], move: Move) -> Optional[CrossAttentionState]:
    """The sources of the sentences that are left, untouched while all are; how far each row has come moves with it."""
    if cross is None:
        return None
    if cross.lengths is not None:
        cross = cross._replace(lengths=cross.lengths.index_select(0, move.order))
    if move.first is not None:
        return cross
    tensors = {name: getattr(cross, name) for name in ("keys", "values", "padding")}
    chosen = {name: None if t is None else t.index_select(0, move.sources) for name, t in tensors.items()}
    return cross._replace(**chosen)
