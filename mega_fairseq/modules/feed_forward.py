"""The normalised feed-forward layer: Y = Norm(X + W_2 activation(W_1 X)), or its pre-norm form (paper, section 3.4)."""

from dataclasses import dataclass
from typing import Optional, Tuple, Union

from torch import Tensor, nn

from mega_fairseq.modules.checks import check_padding_mask, check_sequence, check_state_shape
from mega_fairseq.modules.config import ModuleConfig, setting
from mega_fairseq.modules.dropout_switch import DropoutSwitch
from mega_fairseq.modules.mixer_state import Sliced
from mega_fairseq.modules.normalization import SequenceNorm
from mega_fairseq.modules.projection import linear
from mega_fairseq.ops.activations import ACTIVATIONS
from mega_fairseq.ops.dropout import dropped
from mega_fairseq.ops.gates import activated_linear
from mega_fairseq.ops.linear import ready_linear
from mega_fairseq.ops.padding import Padding, as_mask, to_front
from mega_fairseq.ops.shift import shifted_token, token_shift

GATED = {"geglu": "gelu"}  # W_2 (gelu(W_1 X) * W_3 X) (Shazeer 2020)
FEED_FORWARD_ACTIVATIONS = (*ACTIVATIONS, *GATED)


@dataclass(frozen=True)
class FeedForwardConfig(ModuleConfig):
    """Options of the normalised feed-forward layer."""

    hidden_dim: int = setting(0, "width of feed-forward layers", "{side}_ffn_embed_dim")  # 0: twice dim
    activation: str = setting("silu", "activation of the hidden layer", "ffn_activation_fn", fallback="activation_fn")
    activation_dropout: float = setting(0.0, "dropout inside feed-forward layers", "activation_dropout")
    token_shift: bool = setting(
        False, "replace half of each token's channels by those of the token before", "{side}_token_shift"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.set_default("hidden_dim", 2 * self.dim)
        self.check_positive("hidden_dim")
        self.check_choice("activation", FEED_FORWARD_ACTIVATIONS)
        self.check_probability("activation_dropout")


class NormalizedFeedForward(nn.Module):
    """(B, L, D) -> (B, L, D), position by position, with norm and residual connection.

    With token shift, `y, last = module(x, padding_mask, last)`; `last` (B, floor(D / 2)) is of the token before x, or
    `Sliced` if x is a slice.
    """

    def __init__(self, config: FeedForwardConfig):
        super().__init__()
        self.config = config
        self.norm = SequenceNorm(config.norm, config.dim, affine=config.norm_affine)
        self.expand = linear(config.dim, config.hidden_dim, config.init)
        self.gate = linear(config.dim, config.hidden_dim, config.init) if config.activation in GATED else None
        self.contract = linear(config.hidden_dim, config.dim, config.init)
        self.dropout_module = DropoutSwitch()

    def forward(
        self, x: Tensor, padding_mask: Optional[Padding] = None, last: Union[Tensor, Sliced, None] = None
    ) -> Union[Tensor, Tuple[Tensor, Tensor]]:
        c, rate = self.config, self.dropout_module.rate
        slices, last = last if isinstance(last, Sliced) else (None, last)
        check_sequence("x", x, c.dim, self.expand.weight)
        check_padding_mask(padding_mask, x)
        if isinstance(last, Tensor):
            check_state_shape("last", last, (x.size(0), c.dim // 2))
        align = None
        if c.token_shift:
            x, align, padding_mask = to_front(x, padding_mask)
        padding_mask = as_mask(padding_mask)
        if padding_mask is not None:  # keeps values at pads, even NaN, out of sums over positions
            x = x.masked_fill(padding_mask.unsqueeze(-1), 0.0)
        residual = x
        if c.prenorm:
            x = self.norm(x, padding_mask)
        if c.token_shift:
            x, last = token_shift(x, last, None if align is None else align.lengths, slices)
        hidden = activated_linear(x, self.expand.weight, self.expand.bias, GATED.get(c.activation, c.activation))
        if self.gate is not None:
            hidden = hidden * self.gate(x)
        x = dropped(hidden, rate(c.activation_dropout), c.feature_dropout)  # (B, L, H)
        x = residual + dropped(self.contract(x), rate(c.dropout), c.feature_dropout)  # (B, L, H) -> (B, L, D)
        if not c.prenorm:
            x = self.norm(x, padding_mask)
        if padding_mask is not None:
            x = x.masked_fill(padding_mask.unsqueeze(-1), 0.0)
        if not c.token_shift:
            return x
        return x if align is None else align.back(x), last

    def step(self) -> "FeedForwardStep":
        return FeedForwardStep(self)


class FeedForwardStep:
    """The layer for one token at a time, (R, 1, D) -> (R, 1, D). It reads the weights when it is created."""

    def __init__(self, module: NormalizedFeedForward):
        self.config, self.norm = module.config, module.norm
        self.activation = ACTIVATIONS[GATED.get(self.config.activation, self.config.activation)].forward
        self.expand = ready_linear(module.expand.weight, module.expand.bias)
        self.gate = None if module.gate is None else ready_linear(module.gate.weight, module.gate.bias)
        self.contract = ready_linear(module.contract.weight, module.contract.bias)

    def __call__(
        self, x: Tensor, padding_mask: None = None, last: Optional[Tensor] = None
    ) -> Union[Tensor, Tuple[Tensor, Tensor]]:
        c, residual = self.config, x.squeeze(1)  # (R, D)
        x = self.norm(residual) if c.prenorm else residual
        if c.token_shift:
            x, last = shifted_token(x, last)
        hidden = self.activation(self.expand(x))
        if self.gate is not None:
            hidden = hidden * self.gate(x)
        x = residual + self.contract(hidden)
        x = (x if c.prenorm else self.norm(x)).unsqueeze(1)
        return (x, last) if c.token_shift else x
