"""The state of a decoder between steps, and how beam search reorders it.

Beam search replaces the state of each row by that of the row that it continues. Two beams of a sentence share all
tokens from before they diverged, so only later tokens are copied, in place. All beams of a sentence share one
projection of its source.
"""

import logging
from typing import Any, Callable, List, NamedTuple, Optional, Tuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from mega_fairseq.models.cuda_graph import capture_on, try_capture
from mega_fairseq.modules import BlockState, BlockStep
from mega_fairseq.modules.mixer_state import batch_size
from mega_fairseq.ops.attention.segments import Segments
from mega_fairseq.ops.linear import Projection
from mega_fairseq.ops.operators import is_plain

logger = logging.getLogger(__name__)


class PackedWeights(NamedTuple):
    """The weights of a decoder prepared for single tokens: a copy."""

    blocks: Tuple[BlockStep, ...]
    output: Projection  # of features (R, D)


class PackedWeightsCache:
    """Keeps packed weights for as long as the decoder is unchanged. Copies and pickles of it are empty.

    Each generation compares modules, their hooks, and parameters and buffers by identity, version and a weighted sum of
    each row, since writing to `.data` changes no version. It does not notice a change of a row that leaves this sum in
    float32 as it is, nor of a number that is neither a parameter nor a buffer.
    """

    def __init__(self):
        # Key, a function that computes the sums, their values, weights; replaced as a whole: threads may share it.
        self.made: Optional[Tuple[List[Any], Callable[[], Tensor], Tensor, PackedWeights]] = None

    def get(self, decoder: nn.Module, pack: Callable[[], PackedWeights]) -> PackedWeights:
        # Tensors that are not plain are not packed.
        tensors = [t for t in (*decoder.parameters(), *decoder.buffers()) if is_plain(t)]
        key = [bool(_has_any_global_hook())]
        key += [(m, type(m), [*m._forward_hooks, *m._forward_pre_hooks]) for m in decoder.modules()]
        key += [(id(t), t.data_ptr(), t.dtype, None if t.is_inference() else t._version) for t in tensors]
        made = self.made
        if made is None or made[0] != key or not torch.equal(made[1](), made[2]):
            sums = _sums_of(tensors)
            made = self.made = (key, sums, sums().clone(), pack())
        return made[3]

    def __reduce__(self) -> Tuple:
        return PackedWeightsCache, ()


def _sums_of(tensors: List[Tensor]) -> Callable[[], Tensor]:
    """A function that computes the row sums of these tensors: hundreds of small kernels, on a GPU as one graph."""

    def sums() -> Tensor:
        return torch.cat([_row_sums(t) for t in tensors])

    capture = capture_on(tensors[0].device)
    if capture is None:
        return sums
    out: List[Tensor] = []

    def store() -> None:
        out[:] = [sums()]

    replays, reason = try_capture(lambda: capture([store]))
    if replays is None:
        logger.warning("comparing weights without a CUDA graph, which is slower: %s", reason)
        return sums

    def replayed() -> Tensor:
        replays[0]()
        return out[0]

    return replayed


def _row_sums(tensor: Tensor) -> Tensor:
    """(R, ...) -> (R,), with another weight for each number of a row."""
    rows = tensor.detach().float()
    rows = rows.flatten(1) if rows.dim() > 1 else rows.view(1, -1)
    return rows @ torch.linspace(1.0, 2.0, rows.size(1), device=rows.device)


class DecoderState(NamedTuple):
    blocks: Tuple[BlockState, ...]
    length: int  # tokens seen
    shared: Optional[Tensor] = None  # (S, b, b) on the CPU: number of first tokens that two beams of a sentence share
    packed: Optional[PackedWeights] = None
    segments: Optional[Segments] = None  # the place of the last token of each row, if attention depends on lines

    def __reduce__(self) -> Tuple:
        return DecoderState, (self.blocks, self.length, self.shared, None, self.segments)  # the next step packs again


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
    blocks = tuple(past.reorder(*move[:3]) for past in state.blocks)
    segments = None if state.segments is None else state.segments.select(order, move.sources)
    return state._replace(blocks=blocks, shared=move.shared, segments=segments)


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
