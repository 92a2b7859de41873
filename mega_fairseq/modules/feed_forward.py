"""The normalised feed-forward layer: Y = Norm(X + W_2 activation(W_1 X)), or its pre-norm form (paper, section 3.4)."""

from typing import Optional

from torch import Tensor, nn

from mega_fairseq.modules.checks import check_padding_mask, check_sequence
from mega_fairseq.modules.config import FeedForwardConfig
from mega_fairseq.modules.linear import linear
from mega_fairseq.modules.normalization import SequenceNorm
from mega_fairseq.ops.dropout import dropped
from mega_fairseq.ops.gating import activated_linear
from mega_fairseq.ops.padding import Padding, as_mask


class NormalizedFeedForward(nn.Module):
    """(B, L, D) -> (B, L, D), position by position; residual and norm included."""

    def __init__(self, config: FeedForwardConfig):
        super().__init__()
        self.config = config
        self.norm = SequenceNorm(config.norm, config.dim, affine=config.norm_affine)
        self.expand = linear(config.dim, config.hidden_dim, config.init)
        self.contract = linear(config.hidden_dim, config.dim, config.init)

    def forward(self, x: Tensor, padding_mask: Optional[Padding] = None) -> Tensor:
        c = self.config
        check_sequence("x", x, c.dim, self.expand.weight)
        check_padding_mask(padding_mask, x)
        activation_dropout, dropout = (c.activation_dropout, c.dropout) if self.training else (0.0, 0.0)
        padding_mask = as_mask(padding_mask)
        if padding_mask is not None:  # whatever stands at pads, NaN too, stays out of sums over positions
            x = x.masked_fill(padding_mask.unsqueeze(-1), 0.0)
        residual = x
        if c.prenorm:
            x = self.norm(x, padding_mask)
        x = activated_linear(x, self.expand.weight, self.expand.bias, c.activation)  # (B, L, D) -> (B, L, H)
        x = dropped(x, activation_dropout, c.feature_dropout)
        x = residual + dropped(self.contract(x), dropout, c.feature_dropout)  # (B, L, H) -> (B, L, D)
        if not c.prenorm:
            x = self.norm(x, padding_mask)
        return x if padding_mask is None else x.masked_fill(padding_mask.unsqueeze(-1), 0.0)
