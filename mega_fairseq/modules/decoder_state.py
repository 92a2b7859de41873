"""The state of a decoder between steps, and how beam search reorders it.

Beam search replaces the state of each row by that of the row that it continues. Two beams of a sentence share all
tokens from before they diverged, so only later tokens are copied, in place. All beams of a sentence share one
projection of its source.
"""

from typing import NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from mega_fairseq.modules.block import BlockState, BlockStep
from mega_fairseq.modules.mixer_state import batch_size
from mega_fairseq.ops.attention.segments import Segments
from mega_fairseq.ops.linear import Projection


class PackedWeights(NamedTuple):
    """The weights of a decoder prepared for single tokens: a copy."""

    blocks: Tuple[BlockStep, ...]
    output: Projection  # of features (R, D)


class DecoderState(NamedTuple):
    blocks: Tuple[BlockState, ...]
    length: int  # tokens seen
    shared: Optional[Tensor] = None  # (S, b, b) on the CPU: number of first tokens that two beams of a sentence share
    packed: Optional[PackedWeights] = None
    segments: Optional[Segments] = None  # the place of the last token of each row, if attention depends on lines

    def eager(self) -> "DecoderState":
        """This state, as opposed to one whose tensors are in the storage of a CUDA graph."""
        return self

    def reorder(self, order: Tensor, alike: bool = True) -> "DecoderState":
        """Replaces row i by row order[i]; there are fewer rows than before if sentences are finished.

        This state must not be used afterwards, since its caches are overwritten. With dropout in generation, rows are
        not `alike`: those of the same tokens have other states.
        """
        chosen = order.cpu()
        if torch.equal(chosen, torch.arange(batch_size(self.blocks[0].mixer), device="cpu")):
            return self
        last, sources, shared = self._differences(chosen, alike)
        sources = None if sources is None else sources.to(order.device)
        blocks = tuple(past.reorder(order, last, sources) for past in self.blocks)
        segments = None if self.segments is None else self.segments.select(order, sources)
        return self._replace(blocks=blocks, shared=shared, segments=segments)

    def _differences(self, order: Tensor, alike: bool) -> Tuple[Optional[int], Optional[Tensor], Optional[Tensor]]:
        """How rows differ from those that they continue, by an order (R',) on the CPU, and the next `shared`.

        First the number of last tokens in which they may differ, None for all, and the sources (S',) that remain, or
        that of each row if sentences are mixed, None for all. The b rows of a sentence are consecutive, before and
        after.
        """
        if self.blocks[0].cross is None:  # without a source, the sentence of a row is unknown
            return None, None, None
        sources = self.blocks[0].cross.keys.size(0)
        beams = batch_size(self.blocks[0].mixer) // sources
        sentence = order // beams
        if order.numel() % beams or not torch.equal(sentence, sentence[::beams].repeat_interleave(beams)):
            return None, sentence, None
        kept = sentence[::beams]  # (S',)
        beam = (order % beams).view(-1, beams)  # (S', b) which beam of its sentence each one continues
        shared = self.shared
        if shared is None:
            shared = torch.zeros(sources, beams, beams, dtype=torch.long, device="cpu")
        common = shared[kept].gather(1, beam.unsqueeze(2).expand(-1, -1, beams))  # by the parent and each beam
        last, left = None, kept
        if torch.equal(kept, torch.arange(sources, device="cpu")):
            with_parent = common.diagonal(dim1=1, dim2=2)  # shared by the parent and the previous row at this position
            moved = beam != torch.arange(beams, device="cpu")
            last, left = self.length - int(with_parent[moved].min()), None
        shared = common.gather(2, beam.unsqueeze(1).expand(-1, beams, -1))
        if alike:
            shared = shared.masked_fill(beam.unsqueeze(2) == beam.unsqueeze(1), self.length)  # the same parent
        return last, left, shared

    def __reduce__(self) -> Tuple:
        return DecoderState, (self.blocks, self.length, self.shared, None, self.segments)  # the next step packs again
