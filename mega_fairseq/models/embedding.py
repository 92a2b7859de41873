"""Embeddings of tokens."""

import re
from typing import Dict, Mapping, Optional

from fairseq import utils
from fairseq.data import Dictionary
from torch import Tensor, nn

from mega_fairseq.modules.adaptive_input import TokenEmbedding


def token_embedding(dictionary: Dictionary, dim: int, path: Optional[str] = None) -> nn.Embedding:
    """Embeddings drawn from N(0, 1 / dim), with 0 for the pad; types in the file at `path` get its numbers."""
    embedding = TokenEmbedding(len(dictionary), dim, padding_idx=dictionary.pad())
    nn.init.normal_(embedding.weight, std=dim**-0.5)
    nn.init.zeros_(embedding.weight[dictionary.pad()])
    if path:
        utils.load_embedding(_pre_trained(path, dictionary, dim), dictionary, embedding)
    return embedding


def _pre_trained(path: str, dictionary: Dictionary, dim: int) -> Dict[str, Tensor]:
    """The rows of the file for the types of the dictionary; without any, fairseq would leave all embeddings random."""
    try:
        rows = utils.parse_embedding(path)
    except (OSError, StopIteration, ValueError):  # StopIteration: not even a header
        rows = {}
    known = {word: row for word, row in rows.items() if word in dictionary}
    if not known or any(row.numel() != dim or not row.isfinite().all() for row in known.values()):
        raise ValueError(
            f"--encoder-embed-path or --decoder-embed-path is {path}, which is not a file with {dim} finite numbers "
            "for each word and with words of the dictionary"
        )
    return known


TABLES = re.compile(r"(embeddings\.\d+\.0\.)?weight")  # one, or one for each band of an adaptive input


def types_of(tensors: Mapping[str, Tensor], embedding: str) -> int:
    """The number of types in the embedding tables of a state dict."""
    start = f"{embedding}."
    tables = (t for name, t in tensors.items() if name.startswith(start) and TABLES.fullmatch(name[len(start) :]))
    return sum(sum(table.shape[:1]) for table in tables)


class NarrowEmbedding(TokenEmbedding):
    """Embeddings narrower than the model, projected to its width."""

    def __init__(self, dictionary: Dictionary, dim: int, out_dim: int, path: Optional[str] = None):
        super().__init__(len(dictionary), dim, _weight=token_embedding(dictionary, dim, path).weight.detach())
        self.project = nn.Linear(dim, out_dim, bias=False)
        nn.init.xavier_uniform_(self.project.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.project(super().forward(tokens))  # (B, L) -> (B, L, dim) -> (B, L, D)
        return x.to(self.weight.dtype)  # under autocast, so that residuals are in float32
