"""Token mixers with one mistake each that public code makes, or almost made here, for test_mixer_controls.py.

Each is a subclass of a correct mixer; `broken` turns a correct one into it, with the same parameters.
"""

from copy import copy
from typing import Any, Optional, Tuple, Type

import torch
from torch import Tensor

from mega_fairseq.modules import Mixer
from mega_fairseq.modules.mixers.aft import WindowedAFT
from mega_fairseq.modules.mixers.flash import FlashState, MixedChunkAttention
from mega_fairseq.modules.mixers.gau import GatedAttentionUnit
from mega_fairseq.modules.mixers.gmlp import GatedMLP, Weights
from mega_fairseq.modules.mixers.multi_head import MultiHeadAttention
from mega_fairseq.modules.mixers.sparse import SparseAttention
from mega_fairseq.ops.sparse import visible_places
from tests.properties.contracts import Layer


def broken(healthy: Mixer, kind: Type[Mixer]) -> Mixer:
    """A mixer of another class with the parameters of `healthy`."""
    twin = copy(healthy)
    twin.__class__ = kind
    return twin


# ------------------------------------------------------------------------------------------- divisors


class DividesByTheLength(GatedAttentionUnit):
    """Every row divides by the number of all keys, later ones included."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, padding: Optional[Tensor]) -> Tensor:
        seen = torch.arange(1, k.size(1) + 1)[-q.size(1) :].unsqueeze(-1)  # (n, 1)
        return super().attend(q, k, v, padding) * (seen / k.size(1))


class DividesByTheChunk(MixedChunkAttention):
    """The memory is divided by c, and not by the number of its tokens, so that it grows."""

    def linear_maps(self, shared: Tensor, places: Tensor) -> Tuple[Tensor, Tensor]:
        queries, keys = super().linear_maps(shared, places)
        return queries * places.div(self.config.chunk_size, rounding_mode="floor").clamp_min(1).unsqueeze(-1), keys


class CountsPads(MixedChunkAttention):
    """Pads add nothing to the sums, but count in their divisors."""

    def _bidirectional(self, shared: Tensor, values: Tensor, batch: Any) -> Tuple[Tensor, None]:
        if batch.padding is not None:
            values = values.masked_fill(batch.padding.unsqueeze(-1), 0.0)
        return super()._bidirectional(shared, values, batch._replace(padding=None))


class CountsTheTokensOfTheFirstRow(MixedChunkAttention):
    """All rows take the number of finished tokens from the first."""

    def _causal(self, shared: Tensor, values: Tensor, batch: Any) -> Tuple[Tensor, FlashState]:
        if batch.state is not None:
            finished = batch.state.finished
            batch = batch._replace(state=batch.state._replace(finished=finished[:1].expand_as(finished)))
        return super()._causal(shared, values, batch)


# ------------------------------------------------------------------------------------------- places and states


class CountsPlacesInThePiece(MultiHeadAttention):
    """The first query of a piece takes the first entry of a table, wherever the piece starts in its chunk."""

    def at(self, table: Optional[Tensor], places: slice) -> Optional[Tensor]:
        return super().at(table, slice(0, places.stop - places.start))


def forgets_the_token_before(mixer: Mixer) -> Layer:
    """Token shift starts every piece with zeros."""

    def step(x: Tensor, state: Any, mask: Optional[Tensor]) -> Tuple[Tensor, Any]:
        return mixer(x, None if state is None else state._replace(last=torch.zeros_like(state.last)), mask)

    return Layer(step, list(mixer.parameters()))


def adds_to_its_memory(flash: MixedChunkAttention) -> Layer:
    """Adds finished chunks to the given memory, to save an allocation."""

    def step(x: Tensor, state: Optional[FlashState], mask: Optional[Tensor]) -> Tuple[Tensor, FlashState]:
        y, new = flash(x, state, mask)
        if state is None:
            return y, new
        with torch.no_grad():
            return y, new._replace(memory=state.memory.copy_(new.memory))

    return Layer(step, list(flash.parameters()))


class KeepsItsWeights(GatedMLP):
    """Computes the weights of its places once for evaluation."""

    def __init__(self, config: Any):
        super().__init__(config)
        self.kept = {}

    def weights(self, queries: int, keys: int) -> Weights:
        if self.training:
            return super().weights(queries, keys)
        if (queries, keys) not in self.kept:
            made = super().weights(queries, keys)
            self.kept[queries, keys] = Weights(*(None if t is None else t.detach() for t in made))
        return self.kept[queries, keys]


# ------------------------------------------------------------------------------------------- numbers


class TakesNoMaximum(WindowedAFT):
    """Divides sums of e^k as they are."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, padding: Optional[Tensor]) -> Tensor:
        distance = torch.arange(k.size(1)).unsqueeze(1) - torch.arange(k.size(1))  # (m, m)
        w = self.log_weight[:, distance.clamp_min(0)].exp() * (distance >= 0)  # (H, m, m)
        e = torch.exp(k - self.largest(k))
        sums = (torch.einsum("htu,buhi->bthi", w, t.unflatten(-1, (w.size(0), -1))) for t in (e * v, e))
        numerator, denominator = (t.flatten(2) for t in sums)
        return numerator / denominator

    def largest(self, k: Tensor) -> Tensor:
        return torch.zeros_like(k[:, :1])


class TakesTheMaximumOfLaterKeys(TakesNoMaximum):
    """Takes off the largest key of the window, which may be far above all keys that a row sees."""

    def largest(self, k: Tensor) -> Tensor:
        return k.amax(1, keepdim=True)


class SeesOneKeyTwice(SparseAttention):
    """The key at i - l is in the band and in the column. It also builds whole matrices."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, padding: Optional[Tensor], finished: None = None) -> Tensor:
        c, places = self.config, torch.arange(k.size(1))
        band, column = (
            visible_places(c.sparsity._replace(sets=sets), c.heads, k.size(1)) for sets in ("first", "second")
        )
        times = band.double() + (column & (places != places.unsqueeze(1)))  # (H, n, n)
        q, k, v = (t.unflatten(-1, (c.heads, -1)) for t in (q, k, v))  # (G, n, H, z)
        scores = torch.einsum("gihz,gjhz->ghij", q, k) * q.size(-1) ** -0.5 + times.to(q).log()
        return torch.einsum("ghij,gjhz->gihz", torch.softmax(scores, -1), v).flatten(2)
