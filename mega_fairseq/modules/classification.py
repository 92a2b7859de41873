"""What a sequence classifier has besides its blocks: an embedding of real numbers, pooling, and the head."""

from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mega_fairseq.modules.layer import DropoutSwitch
from mega_fairseq.ops.dropout import dropped
from mega_fairseq.ops.precision import at_least_float32

POOLINGS = ("mean", "first")


class ValueEmbedding(nn.Module):
    """Real numbers (B, L) -> (B, L, D): w x + b."""

    def __init__(self, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(dim))
        self.bias = nn.Parameter(0.1 * torch.randn(dim))

    def forward(self, values: Tensor) -> Tensor:
        return torch.addcmul(self.bias, values.unsqueeze(-1).to(self.weight.dtype), self.weight)


def pool(x: Tensor, lengths: Optional[Tensor], pooling: str) -> Tensor:
    """(B, L, D), with real positions first and zeros at pads -> (B, D): their mean, or the first of them.

    `lengths` (B,) counts real positions; None if all are.
    """
    if pooling == "first":
        return x[:, 0]
    if lengths is None:
        return x.mean(1)
    total = x.sum(1, dtype=at_least_float32(x.dtype))  # which may be large
    return (total / lengths.clamp_min(1).unsqueeze(1)).to(x.dtype)


class ClassificationHead(nn.Module):
    """Features (B, F) -> scores (B, classes): hidden layers with GELU, then a projection without bias."""

    def __init__(self, dim: int, hidden_dim: int, layers: int, classes: int, dropout: float = 0.0):
        super().__init__()
        widths = [dim] + layers * [hidden_dim]
        self.hidden = nn.ModuleList(nn.Linear(width, hidden_dim) for width in widths[:-1])
        self.out = nn.Linear(widths[-1], classes, bias=False)
        self.dropout = dropout
        self.dropout_module = DropoutSwitch()
        for linear in (*self.hidden, self.out):
            nn.init.xavier_uniform_(linear.weight)
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        for linear in self.hidden:
            x = F.gelu(dropped(linear(x), self.dropout_module.rate(self.dropout), False))
        return self.out(x)
