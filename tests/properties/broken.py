"""Layers with one deliberate mistake each that public code makes, or almost made here, for test_controls.py.

Each is made from a correct layer, with the same parameters, so that it can only be rejected because of the mistake.
"""

from copy import copy
from functools import partial
from typing import Any, Callable, Optional, Tuple, Type

import torch
from torch import Tensor, nn

from mega_fairseq.modules import Mixer
from mega_fairseq.modules.mixers.aft import WindowedAFT
from mega_fairseq.modules.mixers.flash import FlashState, MixedChunkAttention
from mega_fairseq.modules.mixers.gau import GatedAttentionUnit
from mega_fairseq.modules.mixers.gmlp import GatedMLP
from mega_fairseq.modules.mixers.multi_head import MultiHeadAttention
from mega_fairseq.modules.mixers.sparse import SparseAttention
from mega_fairseq.ops.attention.chunks import KeyValues
from mega_fairseq.ops.sparse import visible_places
from tests.properties.contracts import Layer, leaves, map_state
from tests.properties.layers import DIM, with_state

Twin = Callable[[Layer], Layer]  # from a correct layer to a broken one


def mistake(step: Callable[..., Tuple[Tensor, Any]]) -> Twin:
    """The twin that runs step(s, x, state, mask), where s is the correct step."""

    def twin(healthy: Layer) -> Layer:
        return Layer(partial(step, healthy.step), healthy.parameters, healthy.start)

    return twin


def as_class(kind: Type[Mixer]) -> Twin:
    """The twin that turns the mixer into one of another class."""
    return lambda healthy: with_state(broken(healthy.step, kind))


def broken(healthy: Mixer, kind: Type[Mixer]) -> Mixer:
    """A mixer of another class with the parameters of `healthy`."""
    twin = copy(healthy)
    twin.__class__ = kind
    return twin


# ------------------------------------------------------------------------------------------- states


@mistake
def forgets_its_state(step, x, state, mask):
    return step(x, None, mask)


@mistake
def forgets_its_unfinished_chunk(step, x, state, mask):
    if state is not None:
        state = state._replace(cache=KeyValues(state.cache.keys[:, :0], state.cache.values[:, :0]))
    return step(x, state, mask)


@mistake
def forgets_the_token_before(step, x, state, mask):
    """Token shift starts every piece with zeros."""
    return step(x, None if state is None else state._replace(last=torch.zeros_like(state.last)), mask)


@mistake
def detaches_its_state(step, x, state, mask):
    """Unintended truncated back-propagation: values are right, but gradients stop at each cut."""
    y, state = step(x, state, mask)
    return y, map_state(torch.detach, state)


@mistake
def returns_a_wrong_state(step, x, state, mask):
    y, new = step(x, state, mask)
    return y, new * (1.0 if state is None else 1.0 + 1e-6)


@mistake
def writes_into_its_state(step, x, state, mask):
    """Overwrites what has the same size in the given state, as a decoder might do to save an allocation."""
    y, new = step(x, state, mask)
    with torch.no_grad():
        for old, now in zip(leaves(state), leaves(new)):
            if isinstance(old, Tensor) and isinstance(now, Tensor) and old.shape == now.shape:
                old.copy_(now)
    return y, new


def keeps_its_state(healthy: Layer) -> Layer:
    """Returns only a placeholder as state; the numbers stay in the layer."""
    kept = []

    def step(x: Tensor, state: Optional[str], mask: Optional[Tensor]) -> Tuple[Tensor, str]:
        y, new = healthy.step(x, kept[-1] if state else None, mask)
        kept.append(new)
        return y, "started"

    return Layer(step)


@mistake
def hides_its_state(step, x, box, mask):
    """Puts its state into a list, so that reordering tensors does not affect it."""
    y, state = step(x, None if box is None else box[0], mask)
    return y, [state]


@mistake
def ages_at_pads(step, x, state, mask):
    """Zeroes padded inputs, but lets the state decay at pads."""
    y, state = step(_without_pads(x, mask), state, None)
    return _without_pads(y, mask), state


def _without_pads(x: Tensor, mask: Optional[Tensor]) -> Tensor:
    return x if mask is None else x.masked_fill(mask.unsqueeze(-1), 0.0)


# ------------------------------------------------------------------------------------------- masks


@mistake
def ignores_the_mask(step, x, state, mask):
    y, state = step(x, state, None)
    return _without_pads(y, mask), state


@mistake
def leaves_padded_outputs(step, x, state, mask):
    y, state = step(x, state, mask)
    return (y if mask is None else y + mask.unsqueeze(-1) * 0.1), state


@mistake
def leaks_gradients_into_pads(step, x, state, mask):
    """Values are right, but padded inputs get gradients."""
    y, state = step(x, state, mask)
    total = x.sum((1, 2), keepdim=True)
    return y + (0.0 if mask is None else (total - total.detach()) * ~mask.unsqueeze(-1)), state


def chunked_means(chunk_size: int, counts_pads: bool = False, looks_ahead: bool = False) -> Layer:
    """Attention with equal weights within chunks, whose borders should count only real tokens."""

    def step(x: Tensor, state: None, mask: Optional[Tensor]) -> Tuple[Tensor, None]:
        real = torch.ones(x.shape[:2], dtype=torch.bool) if mask is None else ~mask
        place = torch.arange(x.size(1)).expand(real.shape) if counts_pads else real.cumsum(1) - 1
        chunk = place.div(chunk_size, rounding_mode="floor")
        visible = (chunk.unsqueeze(2) == chunk.unsqueeze(1)) & real.unsqueeze(1) & real.unsqueeze(2)
        if not looks_ahead:
            visible = visible.tril()
        weights = visible.double() / visible.sum(-1, keepdim=True).clamp_min(1)
        return weights @ x.masked_fill(~real.unsqueeze(-1), 0.0), None

    return Layer(step)


# ------------------------------------------------------------------------------------------- time


@mistake
def normalises_over_time(step, x, state, mask):
    """Uses norm statistics over all positions of all sequences."""
    y, state = step(x - x.mean((0, 1), keepdim=True), state, mask)
    return _without_pads(y, mask), state


@mistake
def shows_values_of_the_next_input(step, x, state, mask):
    y, state = step(x, state, mask)
    return y + 0.01 * _next(x).detach(), state


@mistake
def shows_gradients_of_the_next_input(step, x, state, mask):
    y, state = step(x, state, mask)
    return y + 0.01 * (_next(x) - _next(x).detach()), state


def _next(x: Tensor) -> Tensor:
    return torch.cat([x[:, 1:], torch.zeros_like(x[:, :1])], 1)


@mistake
def drops_the_unfinished_chunk(step, x, state, mask):
    """Processes whole chunks of 4 tokens and returns the remainder unchanged."""
    whole = x.size(1) - x.size(1) % 4
    if whole == 0:
        return x, state
    y, state = step(x[:, :whole], state, mask)
    return torch.cat([y, x[:, whole:]], 1), state


# ------------------------------------------------------------------------------------------- numbers


class PlainEMA(nn.Module):
    """A causal EMA by its kernel. `log_of`: how log phi is computed; `keep`: when the kernel is cached, by mistake."""

    def __init__(self, dim: int = DIM, ndim: int = 2, log_of: str = "safe", keep: str = "never"):
        super().__init__()
        self.alpha, self.delta, self.beta = (nn.Parameter(torch.randn(dim, ndim).double()) for _ in range(3))
        self.log_of, self.keep, self.kept = log_of, keep, None

    def _log_decay(self) -> Tensor:
        if self.log_of == "half":
            decay = 1.0 - (torch.sigmoid(self.alpha) * torch.sigmoid(self.delta))
            return torch.log(decay.to(torch.bfloat16).to(decay.dtype).clamp_min(1e-30))
        product = torch.sigmoid(self.alpha) * torch.sigmoid(self.delta)
        if self.log_of == "naive":
            return torch.log(1.0 - product)
        if self.log_of == "where":  # finite, but the branch that is not taken has an infinite slope
            return torch.where(product < 1.0, torch.log(1.0 - product), torch.full_like(product, -700.0))
        return torch.log((1.0 - product).clamp_min(1e-30))

    def _kernel(self, length: int) -> Tensor:
        steps = torch.arange(length, dtype=self.alpha.dtype)
        return (self.beta.unsqueeze(-1) * torch.exp(self._log_decay().unsqueeze(-1) * steps)).sum(1)  # (D, L)

    def forward(self, x: Tensor, state: None = None, mask: None = None) -> Tuple[Tensor, None]:
        usable = self.kept is not None and self.kept.dtype == x.dtype and self.kept.size(1) >= x.size(1)
        if self.keep == "always" or (self.keep == "in evaluation" and not self.training):
            if not usable:
                self.kept = self._kernel(x.size(1)).detach()
            kernel = self.kept[:, : x.size(1)]
        else:
            kernel = self._kernel(x.size(1))
        lags = torch.arange(x.size(1)).unsqueeze(1) - torch.arange(x.size(1))
        matrix = kernel[:, lags.clamp_min(0)] * (lags >= 0)  # (D, L, L)
        return torch.einsum("dts,bsd->btd", matrix, x), None

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        if self.keep == "in evaluation":  # handles one way of changing parameters and no other
            self.kept = None
        return super().load_state_dict(*args, **kwargs)


class _SpoilsWhatItSaved(torch.autograd.Function):
    """x^2 with a backward that overwrites what forward saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        slope = 2.0 * x
        ctx.slope = slope
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return ctx.slope.mul_(grad)


class SpoilsItsGraph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(DIM).double())

    def forward(self, x: Tensor, state: None = None, mask: None = None) -> Tuple[Tensor, None]:
        return _SpoilsWhatItSaved.apply(x * self.weight), None


# ------------------------------------------------------------------------------------------- divisors of mixers


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


# ------------------------------------------------------------------------------------------- places


class CountsPlacesInThePiece(MultiHeadAttention):
    """The first query of a piece takes the first entry of a table, wherever the piece starts in its chunk."""

    def at(self, table: Optional[Tensor], places: slice) -> Optional[Tensor]:
        return super().at(table, slice(0, places.stop - places.start))


class KeepsItsWeights(GatedMLP):
    """Computes the weights of its places once for evaluation."""

    def __init__(self, config: Any):
        super().__init__(config)
        self.kept = {}

    def tables(self, queries: int, keys: int) -> Tuple:
        if self.training:
            return super().tables(queries, keys)
        if (queries, keys) not in self.kept:
            made = super().tables(queries, keys)
            self.kept[queries, keys] = tuple(None if t is None else t.detach() for t in made)
        return self.kept[queries, keys]


# ------------------------------------------------------------------------------------------- exponentials, sets of keys


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
