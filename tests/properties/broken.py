"""Layers with one deliberate, plausible mistake each, for test_controls.py.

Each wraps a correct layer, or has a correct counterpart, so that it can only be rejected because of the mistake.
"""

from typing import Any, Optional, Tuple

import torch
from torch import Tensor, nn

from mega_fairseq.modules import DampedEMA
from tests.properties.contracts import Layer, map_state
from tests.properties.layers import DIM

# ------------------------------------------------------------------------------------------- mistakes with states


def forgets_its_state(layer: Layer) -> Layer:
    return Layer(lambda x, state, mask: layer.step(x, layer.start(), mask), layer.parameters, layer.start)


def detaches_its_state(layer: Layer) -> Layer:
    """Unintended truncated back-propagation: values are right, but gradients stop at each cut."""

    def step(x: Tensor, state: Any, mask: Optional[Tensor]) -> Tuple[Tensor, Any]:
        y, state = layer.step(x, state, mask)
        return y, map_state(torch.detach, state)

    return Layer(step, layer.parameters, layer.start)


def writes_into_its_state(ema: DampedEMA) -> Layer:
    """Overwrites the given state, as a decoder might do to save an allocation."""

    def step(x: Tensor, state: Optional[Tensor], mask: Optional[Tensor]) -> Tuple[Tensor, Tensor]:
        y, new = ema(x, state, mask)
        if state is not None:
            with torch.no_grad():
                state.copy_(new)
        return y, new

    return Layer(step, list(ema.parameters()))


class KeepsItsStateAsAnAttribute:
    """Returns only a placeholder as state; the numbers stay in the layer."""

    def __init__(self, ema: DampedEMA):
        self.ema, self.kept = ema, None

    def __call__(self, x: Tensor, state: Optional[str], mask: Optional[Tensor]) -> Tuple[Tensor, str]:
        y, self.kept = self.ema(x, self.kept if state else None, mask)
        return y, "started"


class _Box:
    def __init__(self, state: Tensor):
        self.state = state


def hides_its_state(ema: DampedEMA) -> Layer:
    """Wraps its state in an object, so that reordering tensors does not affect it."""

    def step(x: Tensor, box: Optional[_Box], mask: Optional[Tensor]) -> Tuple[Tensor, _Box]:
        y, state = ema(x, None if box is None else box.state, mask)
        return y, _Box(state)

    return Layer(step, list(ema.parameters()))


def ages_at_pads(ema: DampedEMA) -> Layer:
    """Zeroes padded inputs, but lets the state decay at pads."""

    def step(x: Tensor, state: Optional[Tensor], mask: Optional[Tensor]) -> Tuple[Tensor, Tensor]:
        if mask is None:
            return ema(x, state)
        y, state = ema(x.masked_fill(mask.unsqueeze(-1), 0.0), state)
        return y.masked_fill(mask.unsqueeze(-1), 0.0), state

    return Layer(step, list(ema.parameters()))


# ------------------------------------------------------------------------------------------- mistakes with masks


def ignores_the_mask(layer: Layer) -> Layer:
    def step(x: Tensor, state: Any, mask: Optional[Tensor]) -> Tuple[Tensor, Any]:
        y, state = layer.step(x, state, None)
        return (y if mask is None else y.masked_fill(mask.unsqueeze(-1), 0.0)), state

    return Layer(step, layer.parameters, layer.start)


def leaves_padded_outputs(layer: Layer) -> Layer:
    def step(x: Tensor, state: Any, mask: Optional[Tensor]) -> Tuple[Tensor, Any]:
        y, state = layer.step(x, state, mask)
        return (y if mask is None else y + mask.unsqueeze(-1) * 0.1), state

    return Layer(step, layer.parameters, layer.start)


def leaks_gradients_into_pads(layer: Layer) -> Layer:
    """Values are right, but padded inputs get gradients."""

    def step(x: Tensor, state: Any, mask: Optional[Tensor]) -> Tuple[Tensor, Any]:
        y, state = layer.step(x, state, mask)
        total = x.sum((1, 2), keepdim=True)
        return y + (0.0 if mask is None else (total - total.detach()) * ~mask.unsqueeze(-1)), state

    return Layer(step, layer.parameters, layer.start)


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


# ------------------------------------------------------------------------------------------- mistakes with time


def normalises_over_time(layer: Layer) -> Layer:
    """Uses norm statistics over all positions of all sequences."""

    def step(x: Tensor, state: Any, mask: Optional[Tensor]) -> Tuple[Tensor, Any]:
        y, state = layer.step(x - x.mean((0, 1), keepdim=True), state, mask)
        return (y if mask is None else y.masked_fill(mask.unsqueeze(-1), 0.0)), state

    return Layer(step, layer.parameters, layer.start)


def shows_the_next_input(layer: Layer, values: bool, gradients: bool) -> Layer:
    """Adds the next input, only to values or only to gradients."""

    def step(x: Tensor, state: Any, mask: Optional[Tensor]) -> Tuple[Tensor, Any]:
        y, state = layer.step(x, state, mask)
        after = torch.cat([x[:, 1:], torch.zeros_like(x[:, :1])], 1)
        if values:
            y = y + 0.01 * after.detach()
        if gradients:
            y = y + 0.01 * (after - after.detach())
        return y, state

    return Layer(step, layer.parameters, layer.start)


def drops_the_unfinished_chunk(layer: Layer, chunk_size: int) -> Layer:
    """Processes whole chunks and returns the remainder unchanged."""

    def step(x: Tensor, state: Any, mask: Optional[Tensor]) -> Tuple[Tensor, Any]:
        whole = x.size(1) - x.size(1) % chunk_size
        if whole == 0:
            return x, state
        y, state = layer.step(x[:, :whole], state, mask)
        return torch.cat([y, x[:, whole:]], 1), state

    return Layer(step, layer.parameters, layer.start)


# ------------------------------------------------------------------------------------------- mistakes with numbers


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
