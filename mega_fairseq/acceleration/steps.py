"""Steps of a decoder that was prepared for generation: with packed weights and, on a GPU, as CUDA graphs."""

from typing import Any, Optional, Tuple

from torch import Tensor

from mega_fairseq.acceleration.packed import PackedWeightsCache
from mega_fairseq.acceleration.step_graph import StepGraphs
from mega_fairseq.modules.decoder_state import PackedWeights


class PreparedSteps:
    """The form of models/passes.py's `Steps` that `attach` puts in its place."""

    prepared = True

    def __init__(self, with_graphs: bool):
        self.cache = PackedWeightsCache()
        self.graphs: Optional[StepGraphs] = StepGraphs() if with_graphs else None

    def packed(self, decoder: Any) -> PackedWeights:
        return self.cache.get(decoder)

    def scores(self, decoder: Any, tokens: Tensor, state: Any) -> Tuple[Optional[Tensor], Any]:
        return (None, state) if self.graphs is None else self.graphs.step(decoder, tokens, state)
