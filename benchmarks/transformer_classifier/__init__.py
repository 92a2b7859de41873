"""fairseq's Transformer encoder as a classifier: `--user-dir benchmarks/transformer_classifier`, for comparisons.

fairseq's own classifier, `roberta`, takes single inputs of tokens. It learns an embedding of each position and
classifies by the first one. Here fairseq's encoder, unchanged and with sinusoidal positions, takes the place of the
encoder of `mega_classifier`: tokens, bytes or values, pairs, the mean over positions, and the same head. It also
registers Mega without memory beyond a chunk, `mega_classifier_cut`.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Optional, Tuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # also runs without installation

from fairseq.data import Dictionary
from fairseq.dataclass import FairseqDataclass
from fairseq.models import FairseqEncoder, register_model
from fairseq.models.transformer import TransformerConfig
from fairseq.models.transformer.transformer_config import EncDecBaseConfig
from fairseq.models.transformer.transformer_encoder import TransformerEncoderBase
from fairseq.tasks import FairseqTask
from torch import Tensor, nn

import mega_fairseq.tasks  # noqa: F401 - importing them registers them
from mega_fairseq.models.embedding import token_embedding
from mega_fairseq.models.encoder import Encoded
from mega_fairseq.models.mega_classifier import MegaClassifier, MegaClassifierConfig
from mega_fairseq.models.options import option
from mega_fairseq.modules.classification import ValueEmbedding
from mega_fairseq.ops.padding import Alignment

PAD = 1  # of fairseq's dictionaries


@dataclass
class TransformerClassifierConfig(FairseqDataclass):
    encoder_layers: int = option(6, "number of layers")
    encoder_embed_dim: int = option(512, "width")
    encoder_ffn_embed_dim: int = option(2048, "width of feed-forward layers")
    encoder_attention_heads: int = option(8, "number of heads")
    encoder_normalize_before: bool = option(False, "pre-norm")
    dropout: float = option(0.1, "dropout of embeddings and of each layer's output")
    max_positions: int = option(512, "longest input")
    pairs: bool = option(False, "classify pairs of inputs, each encoded alone")
    pooling: str = option("mean", "features: the mean over positions")
    classifier_layers: int = option(1, "hidden layers of the head")
    classifier_dim: int = option(0, "width of the head's hidden layer; 0 for twice --encoder-embed-dim")


class TransformerEncoder(FairseqEncoder):
    """fairseq's encoder with the interface of MegaEncoder. Inputs are padded on the right."""

    def __init__(self, cfg: TransformerClassifierConfig, dictionary: Optional[Dictionary]):
        super().__init__(dictionary)
        dim, self.padding_idx = cfg.encoder_embed_dim, None if dictionary is None else dictionary.pad()
        embedding: nn.Module = ValueEmbedding(dim) if dictionary is None else token_embedding(dictionary, dim)
        embedding.embedding_dim, embedding.padding_idx = dim, PAD
        sizes = EncDecBaseConfig(
            embed_dim=dim,
            ffn_embed_dim=cfg.encoder_ffn_embed_dim,
            layers=cfg.encoder_layers,
            attention_heads=cfg.encoder_attention_heads,
            normalize_before=cfg.encoder_normalize_before,
        )
        # Embeddings of tokens are scaled to the size of the sinusoids; those of values are large enough.
        given = TransformerConfig(encoder=sizes, dropout=cfg.dropout, no_scale_embedding=dictionary is None)
        self.transformer = TransformerEncoderBase(given, dictionary, embedding)

    def encode(self, inputs: Tensor, padding_mask: Tensor) -> Encoded:
        """Inputs and mask (B, L), True = pad. The encoder finds pads and positions in made-up tokens."""
        found = self.transformer(padding_mask.long() * PAD, token_embeddings=self.transformer.embed_tokens(inputs))
        x = found["encoder_out"][0].transpose(0, 1)  # (L, B, D) -> (B, L, D)
        return Encoded(x.masked_fill(padding_mask.unsqueeze(-1), 0.0), Alignment.where_needed(padding_mask), [])


@register_model("transformer_classifier", dataclass=TransformerClassifierConfig)
class TransformerClassifier(MegaClassifier):
    STACKS = ()

    @classmethod
    def build_model(cls, cfg: TransformerClassifierConfig, task: FairseqTask) -> "TransformerClassifier":
        return cls(cfg, TransformerEncoder(cfg, task.source_dictionary))


@register_model("mega_classifier_cut", dataclass=MegaClassifierConfig)
class CutClassifier(MegaClassifier):
    """Mega without memory beyond a chunk: encodes each chunk alone, for inputs of whole chunks of equal length."""

    def forward(
        self, src_tokens: Tensor, src_lengths: Tensor, classification_head_name: str, **unused: Any
    ) -> Tuple[Tensor, Dict[str, Any]]:
        chunks = src_tokens.reshape(-1, self.cfg.encoder_chunk_size)  # (B n, C)
        features = super().forward(chunks)[0].unflatten(0, (len(src_tokens), -1)).mean(1)  # (B, D)
        return self.classification_heads[classification_head_name](features), {"features": features}
