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
    shared: Tensor  # (R, R) on the CPU: how many first tokens two rows certainly have in common
    ready: Optional[Ready] = None

    @classmethod
    def start(cls, blocks: Tuple[MegaBlockState, ...], rows: int) -> "DecoderState":
        return cls(blocks, 0, torch.zeros(rows, rows, dtype=torch.long))


def reorder(state: DecoderState, order: Tensor) -> DecoderState:
    """Row i continues row order[i]; fewer rows than before where sentences are finished.

    The caller owns `state` and gives it up: its caches are written over.
    """
    chosen, rows = order.cpu(), state.shared.size(0)
    steady = chosen.numel() == rows
    moved = chosen != torch.arange(chosen.numel())
    if steady and not moved.any():
        return state
    # Tokens before `parting` are the same in every row and in the one it continues.
    parting = int(state.shared[moved.nonzero(), chosen[moved].unsqueeze(1)].min()) if steady else 0
    siblings = chosen.unsqueeze(1) == chosen
    shared = state.shared[chosen][:, chosen].masked_fill(siblings, state.length)

    def block(past: MegaBlockState) -> MegaBlockState:
        cache, ema = past.mixer.cache, past.mixer.ema.index_select(0, order)
        first = max(0, parting - (state.length - cache.keys.size(1)))  # the cache holds the last tokens only
        mixer = past.mixer._replace(ema=ema, cache=_reordered(cache, order, first if steady else None))
        return MegaBlockState(mixer, None if past.cross is None else _same_sources(past.cross, chosen, rows))

    return state._replace(blocks=tuple(map(block, state.blocks)), shared=shared)


def _reordered(cache: KeyValues, order: Tensor, first: Optional[int]) -> KeyValues:
    """Rows of the cache in their new order; given `first`, in place and from that token on."""
    if first is None or cache.padding is not None or cache.keys.requires_grad:
        return KeyValues(*(None if t is None else t.index_select(0, order) for t in cache[:3]))
    for tensor in (cache.keys[:, first:], cache.values[:, first:]):
        tensor.copy_(tensor.index_select(0, order))
    return cache


def _same_sources(cross: CrossAttentionState, chosen: Tensor, rows: int) -> CrossAttentionState:
    """Sources of the sentences that are still there, one for all beams of a sentence as long as they stay together."""
    beams = rows // cross.keys.size(0)
    sentences = chosen // beams
    if chosen.numel() % beams == 0 and bool((sentences.view(-1, beams) == sentences[::beams].unsqueeze(1)).all()):
        sentences = sentences[::beams]
    if not torch.equal(sentences, torch.arange(cross.keys.size(0))):
        index = sentences.to(cross.keys.device)
        cross = cross._replace(
            keys=cross.keys.index_select(0, index),
            values=cross.values.index_select(0, index),
            padding=None if cross.padding is None else cross.padding.index_select(0, index),
        )
    if cross.lengths is not None:
        cross = cross._replace(lengths=cross.lengths.index_select(0, chosen.to(cross.lengths.device)))
    return cross
