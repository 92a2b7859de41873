"""One token after another through a block: what generation runs, thousands of times, on the same weights.

`BlockStep(block)` is the block for single tokens, with everything that does not depend on them done beforehand:
projections laid out for a few rows, the EMA's coefficients, position biases. Most weights are read when it is made, so
it belongs to one generation, in which none may change. `step(x, state)` equals `block(x, state)` for x (R, 1, D).
"""

from typing import List, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mega_fairseq.modules.attend import weigh_at_one_position
from mega_fairseq.modules.block import MegaBlock, MegaBlockState
from mega_fairseq.modules.cross_attention import CrossAttentionState, GatedCrossAttention
from mega_fairseq.modules.feed_forward import NormalizedFeedForward
from mega_fairseq.modules.gated_attention import GatedAttentionState, MovingAverageGatedAttention
from mega_fairseq.modules.position import PositionBias
from mega_fairseq.ops.activations import ACTIVATIONS
from mega_fairseq.ops.chunks import KeyValues
from mega_fairseq.ops.ema import ema
from mega_fairseq.ops.linear import Projection, packing_runs, ready_linear
from mega_fairseq.ops.precision import at_least_float32, autocast_dtype

LONG_SOURCE = 256  # tokens from which on laying a source's values out pays


class BlockStep:
    """`y, state = step(x, state)`: x (R, 1, D), the state of a block whose rows all stand at one position."""

    def __init__(self, block: MegaBlock):
        self.mixer = AttentionStep(block.mixer)
        self.cross = None if block.cross_attention is None else CrossAttentionStep(block.cross_attention)
        self.feed_forward = None if block.feed_forward is None else FeedForwardStep(block.feed_forward)

    def __call__(self, x: Tensor, state: MegaBlockState) -> Tuple[Tensor, MegaBlockState]:
        x, mixer = self.mixer(x.squeeze(1), state.mixer)  # (R, D)
        cross = None
        if self.cross is not None:
            x, cross = self.cross(x, state.cross)
        if self.feed_forward is not None:
            x = self.feed_forward(x)
        return x.unsqueeze(1), MegaBlockState(mixer, cross)


class AttentionStep:
    """Eq. 6-15 for one token, with one projection of X' for Z and all gates."""

    def __init__(self, module: MovingAverageGatedAttention):
        self.config = c = module.config
        self.norm, self.kappa, self.mu = module.norm, module.kappa, module.mu
        self.activation = ACTIVATIONS[c.activation].forward
        self.coefficients = module.ema.coefficients()
        self.omega = module.ema.omega.to(at_least_float32(module.ema.omega.dtype))
        self.values = ready_linear(module.values.weight, module.values.bias)
        self.mix = _side_by_side(module.shared, module.gates)
        self.hidden = ready_linear(module.hidden.weight, module.hidden.bias)
        self.widths = (c.shared_dim, c.dim, c.value_dim, c.dim)
        self.position_bias = TabledBias(module.position_bias)

    def __call__(self, residual: Tensor, state: GatedAttentionState) -> Tuple[Tensor, GatedAttentionState]:
        c = self.config
        x = self.norm(residual) if c.prenorm else residual  # (R, D)
        values = self.activation(self.values(x))  # V, eq. 10
        x, ema_state = ema(x.unsqueeze(1), self.coefficients, state.ema, self.omega, c.truncation or None)
        mixed = self.mix(F.silu(x.squeeze(1)))  # of X', eq. 6
        shared, update, reset, candidate = mixed.split(self.widths, -1)
        shared = F.silu(shared)  # Z, eq. 7
        queries, keys = torch.addcmul(self.mu.unsqueeze(1), shared, self.kappa.unsqueeze(1))  # eq. 8-9
        cache = state.cache.append(keys.unsqueeze(1), values.unsqueeze(1), c.chunk_size)
        weights = weigh_at_one_position(
            queries.unsqueeze(1), cache.keys, self.position_bias, cache.keys.size(1) - 1, c.attention
        )
        attended = torch.bmm(weights, cache.values).squeeze(1)  # O (R, v), eq. 11
        hidden = self.hidden(F.silu(reset) * attended)
        y = torch.lerp(residual, self.activation(candidate + hidden), torch.sigmoid(update))  # eq. 12-15
        if cache.keys.size(1) == c.chunk_size:  # the chunk is finished, and nobody looks back into it
            cache = KeyValues(keys.new_empty(len(keys), 0, c.shared_dim), values.new_empty(len(keys), 0, c.value_dim))
        return (y if c.prenorm else self.norm(y)), GatedAttentionState(ema_state, cache)


class CrossAttentionStep:
    """Gated cross attention for one token, with one projection of it for the queries and both gates."""

    def __init__(self, module: GatedCrossAttention):
        self.config, self.norm = module.config, module.norm
        self.activation = ACTIVATIONS[module.config.activation].forward
        self.mix = _side_by_side(module.queries, module.gates)
        self.hidden = ready_linear(module.hidden.weight, module.hidden.bias)
        self.position_bias = TabledBias(module.position_bias)
        self.values: Optional[Tensor] = None  # those that `products` multiply with
        self.products: List[Projection] = []

    def __call__(self, residual: Tensor, state: CrossAttentionState) -> Tuple[Tensor, CrossAttentionState]:
        c = self.config
        mixed = self.mix(self.norm(residual) if c.prenorm else residual)
        queries, update, reset = mixed.split((c.shared_dim, c.dim, c.dim), -1)
        beams = queries.reshape(state.keys.size(0), -1, c.shared_dim)  # (R, z) -> (S, R / S, z)
        weights = weigh_at_one_position(
            beams, state.keys, self.position_bias, state.position, c.attention, state.padding
        )
        hidden = self.hidden(F.silu(reset) * self._weighted(weights, state.values).reshape(residual.shape))
        y = torch.lerp(residual, self.activation(hidden), torch.sigmoid(update))
        return (y if c.prenorm else self.norm(y)), state._replace(position=state.position + 1)

    def _weighted(self, weights: Tensor, values: Tensor) -> Tensor:
        """(S, n, m) times (S, m, d); the values of long sources are laid out for it, anew when there are others."""
        if values.size(1) < LONG_SOURCE or not packing_runs(values):
            return torch.bmm(weights, values)
        if self.values is not values:
            self.values, self.products = values, [ready_linear(of_sentence.t()) for of_sentence in values]
        return torch.stack([product(rows) for product, rows in zip(self.products, weights)])


class FeedForwardStep:
    def __init__(self, module: NormalizedFeedForward):
        self.prenorm, self.norm = module.config.prenorm, module.norm
        self.activation = ACTIVATIONS[module.config.activation].forward
        self.expand = ready_linear(module.expand.weight, module.expand.bias)
        self.contract = ready_linear(module.contract.weight, module.contract.bias)

    def __call__(self, residual: Tensor) -> Tensor:
        x = self.norm(residual) if self.prenorm else residual
        x = residual + self.contract(self.activation(self.expand(x)))
        return x if self.prenorm else self.norm(x)


class TabledBias:
    """A position bias that looks its scores up, for those kinds that would compute all of them anew for each token."""

    def __init__(self, bias: PositionBias):
        self.bias, self.rotate = bias, bias.rotate
        self.first = self.stop = 0
        self.table: Optional[Tensor] = None

    def __call__(self, first: int, stop: int, device: torch.device) -> Optional[Tensor]:
        if self.bias.reach is not None:  # a table already, and one that says how far it reaches
            return self.bias(first, stop, device)
        if first < self.first or stop > self.stop:
            self.first, self.stop = min(2 * first, self.first), max(2 * stop, self.stop)
            self.table = self.bias(self.first, self.stop, device)
        return None if self.table is None else self.table[first - self.first : stop - self.first]


def can_step(block: MegaBlock, state: MegaBlockState) -> bool:
    """Whether a single token after `state` may go through a BlockStep: no gradient, no dropout, rows side by side."""
    ragged = state.cross is not None and state.cross.lengths is not None
    begun = state.mixer is not None and state.mixer.cache.padding is None
    plain = not block.training and not torch.is_grad_enabled() and autocast_dtype(block.mixer.mu.device.type) is None
    return begun and not ragged and plain


def _side_by_side(first: torch.nn.Linear, second: torch.nn.Linear) -> Projection:
    return ready_linear(torch.cat([first.weight, second.weight]), torch.cat([first.bias, second.bias]))
