"""What stands around the layers, alike in encoders and decoders: from tokens to the first, and behind the last."""

import math
from typing import Optional

from fairseq import utils
from fairseq.data import Dictionary
from torch import Tensor, nn

from mega_fairseq.models.options import MegaOptions
from mega_fairseq.modules import SequenceNorm
from mega_fairseq.ops.dropout import dropped


def token_embedding(dictionary: Dictionary, dim: int, path: Optional[str] = None) -> nn.Embedding:
    """Embeddings N(0, 1 / dim) with 0 for the pad, or those of a file for the types that it knows."""
    embedding = nn.Embedding(len(dictionary), dim, padding_idx=dictionary.pad())
    nn.init.normal_(embedding.weight, std=dim**-0.5)
    nn.init.zeros_(embedding.weight[dictionary.pad()])
    if path:
        utils.load_embedding(utils.parse_embedding(path), dictionary, embedding)
    return embedding


class NarrowEmbedding(nn.Embedding):
    """Embeddings narrower than the model, brought to its width."""

    def __init__(self, dictionary: Dictionary, dim: int, out_dim: int, path: Optional[str] = None):
        super().__init__(len(dictionary), dim, _weight=token_embedding(dictionary, dim, path).weight.detach())
        self.project = nn.Linear(dim, out_dim, bias=False)
        nn.init.xavier_uniform_(self.project.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.project(super().forward(tokens))  # (B, L) -> (B, L, dim) -> (B, L, D)


def embedding_norm(cfg: MegaOptions, dim: int) -> Optional[SequenceNorm]:
    return SequenceNorm(str(cfg.normalization_type), dim) if cfg.normalize_embedding else None


def final_norm(cfg: MegaOptions, dim: int, affine: bool = True) -> Optional[SequenceNorm]:
    """Pre-norm layers leave what comes out of the last one unnormed."""
    return SequenceNorm(str(cfg.normalization_type), dim, affine=affine) if cfg.normalize_before else None


def embed(stack: nn.Module, tokens: Tensor) -> Tensor:
    """(B, L) -> (B, L, D) with the `embed_tokens`, `embed_norm` and `cfg` of an encoder or decoder."""
    x = stack.embed_tokens(tokens)
    if not stack.cfg.no_scale_embedding:
        x = x * math.sqrt(x.size(-1))
    if stack.embed_norm is not None:
        x = stack.embed_norm(x)
    return dropped(x, stack.cfg.dropout if stack.training else 0.0, stack.cfg.feature_dropout)
