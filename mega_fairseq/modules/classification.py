"""What classifiers and encoders have besides their blocks: an embedding of real numbers, pooling, and heads.

`LanguageModelHead` and `SentenceHead` have the parameters of fairseq's RoBERTa.
"""

from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mega_fairseq.modules.layer import DropoutSwitch
from mega_fairseq.modules.normalization import LayerNorm
from mega_fairseq.modules.projection import plain_weights
from mega_fairseq.ops.dropout import dropped
from mega_fairseq.ops.gates.projection import Weights
from mega_fairseq.ops.precision import at_least_float32

POOLINGS = ("mean", "first")
# What precedes the projection to the vocabulary: RoBERTa's linear layer, GELU and norm; Hugging Face's linear layer and
# tanh; or nothing. A model may also have no such head.
LM_HEADS = ("gelu", "tanh", "linear", "none")


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


class LanguageModelHead(nn.Module):
    """Features (..., D) -> scores (..., V). `weight` (V, D) is that of the embeddings, or a parameter of its own."""

    def __init__(self, kind: str, dim: int, types: int, weight: Optional[nn.Parameter] = None):
        super().__init__()
        self.kind = kind
        self.dense = None if kind == "linear" else nn.Linear(dim, dim)
        self.layer_norm = LayerNorm(dim) if kind == "gelu" else None
        self.weight = nn.Parameter(torch.randn(types, dim) * dim**-0.5) if weight is None else weight
        self.bias = nn.Parameter(torch.zeros(types))

    def forward(self, features: Tensor, masked_tokens: Optional[Tensor] = None) -> Tensor:
        """With a mask (B, L), features (B, L, D) -> scores of only these tokens (N, V)."""
        x = features if masked_tokens is None else features[masked_tokens]
        return F.linear(self.before_projection(x), self.weight, self.bias)

    def before_projection(self, x: Tensor) -> Tensor:
        if self.kind == "gelu":
            return self.layer_norm(F.gelu(self.dense(x)))
        return torch.tanh(self.dense(x)) if self.kind == "tanh" else x

    def output_weights(self) -> Optional[Weights]:
        """The weight (V, D) and bias (V,) after `before_projection`, if they may be read."""
        return plain_weights(self, (LanguageModelHead,))


class SentenceHead(nn.Module):
    """Features (B, L, D), zeros at pads -> scores (B, classes): pooling, linear layer, tanh, projection."""

    def __init__(self, dim: int, hidden_dim: int, classes: int, dropout: float = 0.0, pooling: str = "first"):
        super().__init__()
        self.pooling = pooling
        self.dense, self.out_proj = nn.Linear(dim, hidden_dim), nn.Linear(hidden_dim, classes)
        self.dropout = nn.Dropout(dropout)

    def forward(self, features: Tensor) -> Tensor:
        real = features.any(-1).sum(1)  # callers with features from RoBERTa's interface have no mask
        pooled = pool(features, real, self.pooling)
        hidden = torch.tanh(self.dense(self.dropout(pooled)))
        return self.out_proj(self.dropout(hidden))
