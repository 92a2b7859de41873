"""Embeddings of tokens, and adaptive ones: the rarer a type, the narrower its embedding (Baevski and Auli 2019)."""

from typing import Sequence, Tuple

import torch
from torch import Tensor, nn

from mega_fairseq.ops.lookup import lookup


class TokenEmbedding(nn.Embedding):
    """torch's, with exact gradients in half precision."""

    def forward(self, tokens: Tensor) -> Tensor:
        return lookup(tokens, self.weight, self.padding_idx)


class AdaptiveInput(nn.Module):
    """(B, L) types -> (B, L, D): band i holds the types from cutoff i - 1 up to cutoff i, dim / factor**i wide."""

    def __init__(self, types: int, padding_idx: int, dim: int, out_dim: int, cutoffs: Sequence[int], factor: float):
        super().__init__()
        ends = [*cutoffs, types]
        self.starts, self.padding_idx = [0, *cutoffs], padding_idx
        bands = []
        for i, (start, end) in enumerate(zip(self.starts, ends)):
            width = int(dim // factor**i)
            table, project = TokenEmbedding(end - start, width), nn.Linear(width, out_dim, bias=False)
            nn.init.normal_(table.weight, std=width**-0.5)
            nn.init.xavier_uniform_(project.weight)
            bands.append(nn.Sequential(table, project))
        self.embeddings = nn.ModuleList(bands)
        with torch.no_grad():
            self.embeddings[0][0].weight[padding_idx] = 0.0

    def forward(self, tokens: Tensor) -> Tensor:
        # Every band looks up every token, and zeros those of other bands before projecting. This needs no host
        # synchronisation, and each parameter gets a gradient in each batch, as distributed training requires.
        x = None
        for start, (table, project) in zip(self.starts, self.embeddings):
            local = tokens - start
            other = (local < 0) | (local >= table.num_embeddings) | (tokens == self.padding_idx)
            narrow = table(local.masked_fill(other, 0)).masked_fill(other.unsqueeze(-1), 0.0)
            band = project(narrow).to(narrow.dtype)  # (B, L, width) -> (B, L, D); under autocast, residuals in float32
            x = band if x is None else x + band
        return x

    def weights_for_band(self, band: int) -> Tuple[Tensor, Tensor]:
        """The weights that fairseq's adaptive softmax can share."""
        table, project = self.embeddings[band]
        return table.weight, project.weight
