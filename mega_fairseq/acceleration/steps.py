"""Steps of a decoder that was prepared for generation: with packed weights and, on a GPU, as CUDA graphs."""

import logging
from typing import Any, Callable, List, Optional, Tuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from mega_fairseq.acceleration.cuda_graph import capture_on, try_capture
from mega_fairseq.acceleration.step_graph import StepGraphs
from mega_fairseq.modules.decoder_state import PackedWeights
from mega_fairseq.ops.operators import is_plain

logger = logging.getLogger(__name__)


class PreparedSteps:
    """The form of models/passes.py's `Steps` that models/attach.py puts in its place; copies and pickles are empty.

    It keeps packed weights for as long as the decoder is unchanged: each generation compares modules, their hooks, and
    parameters and buffers by identity, version and a weighted sum of each row, since writing to `.data` changes no
    version. It does not notice a change of a row that leaves this sum in float32 as it is, nor of a number that is
    neither a parameter nor a buffer.
    """

    prepared = True

    def __init__(self, with_graphs: bool):
        self.graphs: Optional[StepGraphs] = StepGraphs() if with_graphs else None
        # Key, a function that computes the sums, their values, weights; replaced as a whole: threads may share it.
        self.made: Optional[Tuple[List[Any], Callable[[], Tensor], Tensor, PackedWeights]] = None

    def packed(self, decoder: nn.Module) -> PackedWeights:
        # Tensors that are not plain are not packed.
        tensors = [t for t in (*decoder.parameters(), *decoder.buffers()) if is_plain(t)]
        key = [bool(_has_any_global_hook())]
        key += [(m, type(m), [*m._forward_hooks, *m._forward_pre_hooks]) for m in decoder.modules()]
        key += [(id(t), t.data_ptr(), t.dtype, None if t.is_inference() else t._version) for t in tensors]
        made = self.made
        if made is None or made[0] != key or not torch.equal(made[1](), made[2]):
            sums = _sums_of(tensors)
            made = self.made = (key, sums, sums().clone(), decoder.pack())
        return made[3]

    def scores(self, decoder: Any, tokens: Tensor, state: Any) -> Tuple[Optional[Tensor], Any]:
        return (None, state) if self.graphs is None else self.graphs.step(decoder, tokens, state)

    def __reduce__(self) -> Tuple:
        return PreparedSteps, (self.graphs is not None,)


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
