"""The normalised feed-forward layer: Y = Norm(X + W_2 activation(W_1 X)), or its pre-norm form (paper, section 3.4)."""

from dataclasses import dataclass
from typing import Callable, Optional, Tuple, Union

import torch
from torch import Tensor, nn

from mega_fairseq.modules.config import ModuleConfig, setting
from mega_fairseq.modules.layer import Layer, check_padding_mask
from mega_fairseq.modules.projection import linear, packed, project, project_gated
from mega_fairseq.ops.activations import ACTIVATIONS
from mega_fairseq.ops.padding import Padding, as_mask, to_front
from mega_fairseq.ops.shift import shifted_token, token_shift

GATED = {"geglu": "gelu", "swiglu": "silu"}  # W_2 (gelu(W_1 X) * W_3 X) (Shazeer 2020)
RESCALE = 0.1  # first value of `rescale` in the first layer; in each later one half of that before (Megalodon's code)
FEED_FORWARD_ACTIVATIONS = (*ACTIVATIONS, *GATED)


@dataclass(frozen=True)
class FeedForwardConfig(ModuleConfig):
    """Options of the normalised feed-forward layer."""

    hidden_dim: int = setting(0, "width of feed-forward layers", "{side}_ffn_embed_dim")  # 0: twice dim
    activation: str = setting(
        "silu",
        "activation of the hidden layer",
        "ffn_activation_fn",
        fallback="activation_fn",
        choices=FEED_FORWARD_ACTIVATIONS,
    )
    activation_dropout: float = setting(0.0, "dropout inside feed-forward layers", "activation_dropout")
    token_shift: bool = setting(
        False, "replace half of each token's channels by those of the token before", "{side}_token_shift"
    )
    two_hop: bool = setting(
        False, "add the output of feed-forward layers to the input of the token mixer before them", "{side}_two_hop"
    )
    rescale: bool = setting(
        False, "learned scale of each channel of the output of feed-forward layers", "{side}_ffn_rescale"
    )
    layer: int = setting(0, "number of this layer, from 0")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.set_default("hidden_dim", 2 * self.dim)
        self.check_positive("hidden_dim")


class NormalizedFeedForward(Layer):
    """(B, L, D) -> (B, L, D), position by position, with norm and residual connection.

    With token shift, `y, last = module(x, padding_mask, last)`; `last` (B, floor(D / 2)) is of the token before x.
    `residual` (B, L, D) is what the output is added to, x by default.
    """

    def __init__(self, config: FeedForwardConfig):
        super().__init__(config)
        self.expand = linear(config.dim, config.hidden_dim, config.init)
        self.gate = linear(config.dim, config.hidden_dim, config.init) if config.activation in GATED else None
        self.contract = linear(config.hidden_dim, config.dim, config.init)
        first = RESCALE * 0.5**config.layer
        self.rescale = nn.Parameter(torch.full((config.dim,), first)) if config.rescale else None

    def forward(
        self,
        x: Tensor,
        padding_mask: Optional[Padding] = None,
        last: Optional[Tensor] = None,
        residual: Optional[Tensor] = None,
    ) -> Union[Tensor, Tuple[Tensor, Tensor]]:
        c, align = self.config, None
        check_padding_mask(padding_mask, x)
        if c.token_shift:
            x, align, padding = to_front(x, padding_mask)
        else:
            padding = as_mask(padding_mask)
        residual = residual if residual is None or align is None else align.front(residual)
        if padding is not None:  # keeps values at pads, even NaN, out of sums over positions
            x = x.masked_fill(padding.unsqueeze(-1), 0.0)
            residual = None if residual is None else residual.masked_fill(padding.unsqueeze(-1), 0.0)
        residual = x if residual is None else residual
        if c.prenorm:
            x = self.norm(x, padding)
        if c.token_shift:
            x, last = token_shift(x, last, None if align is None else align.lengths)
        activation = GATED.get(c.activation, c.activation)
        if self.gate is None and self.dropout_module.rate(c.activation_dropout):
            x = project(self.contract, self.drop(project(self.expand, x, activation), c.activation_dropout))
        else:
            values = None if self.gate is None else self.drop(project(self.gate, x), c.activation_dropout)  # (B, L, H)
            x = project_gated(self.expand, self.contract, x, values, activation)
        x = self.drop(x, c.dropout)
        x = residual + (x if self.rescale is None else self.rescale * x)
        if not c.prenorm:
            x = self.norm(x, padding)
        if padding is not None:
            x = x.masked_fill(padding.unsqueeze(-1), 0.0)
        if not c.token_shift:
            return x
        return x if align is None else align.back(x), last

    def step(self) -> Callable[..., Union[Tensor, Tuple[Tensor, Tensor]]]:
        """The layer for one token at a time, (R, 1, D) -> (R, 1, D), with its current weights."""
        c, norm = self.config, self.norm
        activation = ACTIVATIONS[GATED.get(c.activation, c.activation)].forward
        expand, contract = packed(self.expand), packed(self.contract)
        gate, rescale = None if self.gate is None else packed(self.gate), self.rescale

        def step(
            x: Tensor, padding_mask: None = None, last: Optional[Tensor] = None, residual: Optional[Tensor] = None
        ):
            residual, x = (x if residual is None else residual).squeeze(1), x.squeeze(1)  # (R, D)
            x = norm(x) if c.prenorm else x
            if c.token_shift:
                x, last = shifted_token(x, last)
            hidden = activation(expand(x))
            if gate is not None:
                hidden = hidden * gate(x)
            x = contract(hidden)
            x = residual + (x if rescale is None else rescale * x)
            x = (x if c.prenorm else norm(x)).unsqueeze(1)
            return (x, last) if c.token_shift else x

        return step
