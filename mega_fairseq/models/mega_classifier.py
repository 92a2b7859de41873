"""Sequence classification: a bidirectional encoder, pooling and a head, for the criterion `sentence_prediction`."""

from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Tuple

import torch
import torch.nn.functional as F
from fairseq.dataclass import ChoiceEnum
from fairseq.models import BaseFairseqModel
from fairseq.tasks import FairseqTask
from torch import Tensor, nn

from mega_fairseq.fairseq_options import option
from mega_fairseq.models.embedding import token_embedding
from mega_fairseq.models.encoder import MegaEncoder
from mega_fairseq.models.mega_encoder import HeadedEncoder, HeadedEncoderOptions
from mega_fairseq.models.same_model import check_start
from mega_fairseq.modules.classification import POOLINGS, ClassificationHead, ValueEmbedding, pool
from mega_fairseq.ops.padding import padding_from_lengths
from mega_fairseq.tasks.prediction import Classifier


@dataclass
class MegaClassifierConfig(HeadedEncoderOptions):
    """Options of classifiers."""

    pooling: ChoiceEnum(list(POOLINGS)) = option(
        "mean", "features: the mean over positions, or the first one", released=True
    )
    pairs: bool = option(False, "classify pairs of inputs, each encoded alone; needs a task that has pairs")
    classifier_layers: int = option(1, "hidden layers of the head", least=0, released=True)
    classifier_dim: int = option(
        0,
        "width of the head's hidden layers; 0 for twice --encoder-embed-dim",
        least=0,
        needs="classifier_layers",
        released=True,
    )


class MegaClassifier(HeadedEncoder):
    """Tokens, or real numbers for a task without a dictionary; `--arch mega_classifier` builds it."""

    OPTIONS = MegaClassifierConfig
    takes_values_and_pairs = True  # as its task needs, and fairseq's own classifiers do not

    @property
    def pairs(self) -> bool:
        return self.cfg.pairs

    @classmethod
    def build_model(cls, cfg: MegaClassifierConfig, task: FairseqTask) -> "MegaClassifier":
        if not hasattr(task, "label_dictionary"):
            raise ValueError(
                "--arch mega_classifier predicts one of several classes, and this --task has none; choose another "
                "--arch, or --task mega_classification"
            )
        cls.check_options(cfg, task)
        encoder = MegaEncoder(cfg, task.source_dictionary, _embedding(cfg, task), cfg.max_positions)
        model = cls(cfg, encoder)
        check_start(model, cfg, task)
        return model

    def register_classification_head(self, name: str, num_classes: int, **unused: Any) -> None:
        """Adds a head, as fairseq's tasks do."""
        cfg, dim = self.cfg, self.cfg.encoder_embed_dim
        features = 2 * dim if self.pairs else dim
        self.classification_heads[name] = ClassificationHead(
            features, cfg.classifier_dim or 2 * dim, cfg.classifier_layers, num_classes, cfg.dropout
        )

    @classmethod
    def interface(cls, cfg: Any, task: FairseqTask, models: List[BaseFairseqModel]) -> Classifier:
        """Its `predict` classifies new inputs."""
        return Classifier(task, models)

    def forward(
        self,
        src_tokens: Tensor,
        src_lengths: Optional[Tensor] = None,
        src_tokens1: Optional[Tensor] = None,
        src_lengths1: Optional[Tensor] = None,
        classification_head_name: Optional[str] = None,
        **unused: Any,
    ) -> Tuple[Tensor, Dict[str, Any]]:
        """Inputs (B, L), and (B, L1) for pairs -> scores (B, classes) of a head, or without one features (B, F).

        Tokens are padded on any side, real numbers on the right.
        """
        if (src_tokens1 is not None) != self.pairs:
            raise ValueError(
                "--pairs needs two inputs for each label and the task gives one; choose an --arch without it"
                if self.pairs
                else "the task gives two inputs for each label; add --pairs"
            )
        inputs, padding = src_tokens, self._padding(src_tokens, src_lengths)
        if src_tokens1 is not None:
            inputs, padding = _in_one_batch(inputs, padding, src_tokens1, self._padding(src_tokens1, src_lengths1))
        encoded = self.encoder.encode(inputs, padding)
        features = pool(encoded.x, None if encoded.align is None else encoded.align.lengths, str(self.cfg.pooling))
        if src_tokens1 is not None:
            first, second = features.chunk(2)
            features = torch.cat([second, first], 1)  # the released order
        if classification_head_name is None:
            return features, {}
        return self.classification_heads[classification_head_name](features), {"features": features}

    def _padding(self, inputs: Tensor, lengths: Optional[Tensor]) -> Tensor:
        """(B, L) bool, True = pad."""
        if self.encoder.padding_idx is not None:
            return inputs.eq(self.encoder.padding_idx)
        if lengths is None:
            return torch.zeros_like(inputs, dtype=torch.bool)
        return padding_from_lengths(lengths, inputs.size(1))


def _in_one_batch(x: Tensor, padding: Tensor, other: Tensor, other_padding: Tensor) -> Tuple[Tensor, Tensor]:
    """Two batches of B inputs and their pads -> one of 2B, padded to the longer of them."""
    length = max(x.size(1), other.size(1))

    def widened(tensor: Tensor, value: Any) -> Tensor:
        return F.pad(tensor, (0, length - tensor.size(1)), value=value)

    inputs = torch.cat([widened(x, 0), widened(other, 0)])
    return inputs, torch.cat([widened(padding, True), widened(other_padding, True)])


def _embedding(cfg: MegaClassifierConfig, task: FairseqTask) -> nn.Module:
    if task.source_dictionary is not None:
        return token_embedding(task.source_dictionary, cfg.encoder_embed_dim, cfg.encoder_embed_path)
    if cfg.encoder_embed_path:
        raise ValueError("--encoder-embed-path has embeddings of tokens, and the inputs are numbers; leave it out")
    return ValueEmbedding(cfg.encoder_embed_dim)
