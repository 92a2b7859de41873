"""Embeddings of tokens."""

import os
import re
from typing import Dict, Mapping, Optional

from fairseq import utils
from fairseq.data import Dictionary
from torch import Tensor, nn

from mega_fairseq.ops.lookup import lookup


class TokenEmbedding(nn.Embedding):
    """torch's, with exact gradients in half precision."""

    def forward(self, tokens: Tensor) -> Tensor:
        return lookup(tokens, self.weight, self.padding_idx)


def token_embedding(dictionary: Dictionary, dim: int, path: Optional[str] = None) -> nn.Embedding:
    """Embeddings drawn from N(0, 1 / dim), with 0 for the pad; types in the file at `path` get its numbers."""
    embedding = TokenEmbedding(len(dictionary), dim, padding_idx=dictionary.pad())
    nn.init.normal_(embedding.weight, std=dim**-0.5)
    nn.init.zeros_(embedding.weight[dictionary.pad()])
    if path:
        utils.load_embedding(_pre_trained(path, dictionary, dim), dictionary, embedding)
    return embedding


def _pre_trained(path: str, dictionary: Dictionary, dim: int) -> Dict[str, Tensor]:
    """The rows of the file for the types of the dictionary, `dim` numbers each. Raises an error if there is none."""
    given = f"--encoder-embed-path or --decoder-embed-path is {path}"
    if not os.path.exists(path):
        raise ValueError(f"{given}, which does not exist; give a file of pre-trained embeddings")
    try:
        rows = utils.parse_embedding(path)
    except (OSError, StopIteration, ValueError):  # StopIteration: not even a header
        raise ValueError(
            f"{given}, which lacks a header followed by lines of a word and its numbers; give another file"
        ) from None
    known = {word: row for word, row in rows.items() if word in dictionary}
    if not known:
        raise ValueError(
            f"{given}, which has none of the words in the dictionary; give a file of the same units as the data"
        )
    for word, row in known.items():
        if row.numel() != dim:
            raise ValueError(
                f"{given}, which has {row.numel()} numbers for {word!r}, and embeddings are {dim} wide; set --encoder-"
                "embed-dim, --decoder-embed-dim or --decoder-input-dim to the width of the file"
            )
        if not row.isfinite().all():
            raise ValueError(f"{given}, which has a number that is not finite for {word!r}; give another file")
    return known


TABLES = re.compile(r"(embeddings\.\d+\.0\.)?weight")  # one, or one for each band of an adaptive input


def types_of(tensors: Mapping[str, Tensor], embedding: str) -> int:
    """The number of types in the embedding tables of a state dict."""
    start = f"{embedding}."
    tables = (t for name, t in tensors.items() if name.startswith(start) and TABLES.fullmatch(name[len(start) :]))
    return sum(sum(table.shape[:1]) for table in tables)


def check_types(stack: nn.Module, state_dict: Dict[str, Tensor], name: str) -> None:
    """Raises a one-sentence error for a checkpoint with another dictionary, instead of torch's list of all shapes."""
    stored, types = types_of(state_dict, f"{name}.embed_tokens"), len(stack.dictionary)
    if stored not in (0, types):
        raise ValueError(
            f"the checkpoint's {name} has {stored:,} types and does not fit the {types:,} types of its dictionary "
            "here; give the data that it was trained on, or another --save-dir to train anew"
        )


class NarrowEmbedding(TokenEmbedding):
    """Embeddings narrower than the model, projected to its width."""

    def __init__(self, dictionary: Dictionary, dim: int, out_dim: int, path: Optional[str] = None):
        super().__init__(len(dictionary), dim, _weight=token_embedding(dictionary, dim, path).weight.detach())
        self.project = nn.Linear(dim, out_dim, bias=False)
        nn.init.xavier_uniform_(self.project.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.project(super().forward(tokens))  # (B, L) -> (B, L, dim) -> (B, L, D)
        return x.to(self.weight.dtype)  # under autocast, so that residuals are in float32
