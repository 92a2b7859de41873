"""The heads of language models and of sentence classification, with the parameters of fairseq's RoBERTa."""

from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mega_fairseq.modules.classification import pool
from mega_fairseq.modules.normalization import LayerNorm

# What precedes the projection to the vocabulary: RoBERTa's linear layer, GELU and norm; Hugging Face's linear layer and
# tanh; or nothing. A model may also have no such head.
LM_HEADS = ("gelu", "tanh", "linear", "none")


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
        if self.kind == "gelu":
            x = self.layer_norm(F.gelu(self.dense(x)))
        elif self.kind == "tanh":
            x = torch.tanh(self.dense(x))
        return F.linear(x, self.weight, self.bias)


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
