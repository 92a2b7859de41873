"""Masked language models and their fine-tuning: a bidirectional encoder with heads, used like fairseq's RoBERTa."""

import logging
import re
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple

from fairseq.data.iterators import EpochBatchIterator
from fairseq.dataclass import ChoiceEnum
from fairseq.models import BaseFairseqModel, FairseqEncoderModel
from fairseq.models.roberta import RobertaHubInterface
from fairseq.tasks import FairseqTask
from fairseq.tasks.translation import TranslationTask
from torch import Tensor, nn

from mega_fairseq.data.loading import without_old_workers
from mega_fairseq.fairseq_options import ALWAYS, SAME_SHAPES, is_training, option, option_of_command
from mega_fairseq.models.base import MegaModel
from mega_fairseq.models.embedding import token_embedding
from mega_fairseq.models.encoder import MegaEncoder
from mega_fairseq.models.options import EncoderOptions
from mega_fairseq.models.same_model import check_start
from mega_fairseq.modules import MIXERS
from mega_fairseq.modules.classification import LM_HEADS, POOLINGS, LanguageModelHead, SentenceHead
from mega_fairseq.modules.normalization import NORMS

logger = logging.getLogger(__name__)
HEAD = re.compile(r"(?:classification_heads\.[^.]+|encoder\.lm_head)\.")
CLASSES = re.compile(r"classification_heads\.([^.]+)\.out(?:_proj)?\.weight")  # (classes, width)


@dataclass
class HeadedEncoderOptions(EncoderOptions):
    encoder_token_mixer: ChoiceEnum(list(MIXERS)) = option("mega", "token mixer of all layers")
    normalization_type: ChoiceEnum(list(NORMS)) = option(
        "layernorm", "kind of norm; those over batches ignore pads", released=True, huggingface="normalization_type"
    )
    max_positions: int = option(
        512,
        "longest input, also for the task on a command line; with hydra, set it in the task as well",
        least=1,
        change=SAME_SHAPES,
        released=True,
        huggingface="max_positions",
    )


@dataclass
class MegaEncoderConfig(HeadedEncoderOptions):
    """Options of masked language models and encoders with heads."""

    lm_head: ChoiceEnum(LM_HEADS) = option(
        "gelu",
        "what precedes the projection to the vocabulary: linear and GELU and norm, linear and tanh, or nothing",
        huggingface="add_lm_hidden_dense_layer",
    )
    untie_lm_head: bool = option(
        False,
        "do not share the weights of the embeddings with the language model head",
        huggingface="tie_word_embeddings",
    )
    token_types: int = option(
        0,
        "number of token types, whose embeddings are added to those of tokens",
        least=0,
        huggingface="type_vocab_size",
    )
    pooling: ChoiceEnum(list(POOLINGS)) = option(
        "first", "features for classification: of the first position, or the mean, which sees all chunks"
    )
    pooler_dropout: float = option(
        0.0, "dropout of classification heads", least=0, below=1, change=ALWAYS, huggingface="classifier_dropout"
    )


class HeadedEncoder(MegaModel, FairseqEncoderModel):
    """The base of encoders with heads for classification, which fairseq's tasks register."""

    STACKS = ("encoder",)
    pairs = False  # whether an example has two inputs, each encoded alone

    def __init__(self, cfg: HeadedEncoderOptions, encoder: MegaEncoder):
        super().__init__(encoder)
        self.cfg = cfg
        self.classification_heads = nn.ModuleDict()

    def heads(self) -> Dict[str, nn.Module]:
        """All heads by the prefixes of their tensors."""
        return {f"classification_heads.{name}.": head for name, head in self.classification_heads.items()}

    def register_stored_heads(self, tensors: Mapping[str, Tensor]) -> None:
        """Adds the classification heads of a state dict that it does not have."""
        for key, tensor in tensors.items():
            match = CLASSES.fullmatch(key)
            if match is not None and match[1] not in self.classification_heads:
                self.register_classification_head(match[1], num_classes=tensor.size(0), inner_dim=tensor.size(1))

    def upgrade_state_dict_named(self, state_dict: Dict[str, Tensor], name: str) -> None:
        """Fits a checkpoint to this model.

        A new training from its weights starts with new heads where the checkpoint has none of that size, and leaves
        out heads that the model does not have. Otherwise the model gets all heads of the checkpoint, and refuses one
        that lacks a head.
        """
        super().upgrade_state_dict_named(state_dict, name)
        options = option_of_command(self.cfg, "checkpoint")
        is_new = is_training(self.cfg) and (options.finetune_from_model or options.reset_optimizer)
        if not is_new:
            self.register_stored_heads(state_dict)
        stored: Dict[str, Dict[str, Tensor]] = {}  # by the prefix of a head
        for key, tensor in state_dict.items():
            match = HEAD.match(key)
            if match is not None:
                stored.setdefault(match[0], {})[key] = tensor
        for prefix in stored.keys() - self.heads().keys() if is_new else ():
            logger.warning(f"leaving out {prefix[:-1]} of the checkpoint, which this model does not have")
            for key in stored[prefix]:
                del state_dict[key]
        for prefix, head in self.heads().items():
            own, theirs = {f"{prefix}{key}": t for key, t in head.state_dict().items()}, stored.get(prefix, {})
            if {key: t.shape for key, t in own.items()} == {key: t.shape for key, t in theirs.items()}:
                continue
            difference = "it has other sizes in the checkpoint" if theirs else "the checkpoint does not have it"
            if not is_new:
                raise ValueError(
                    f"{prefix[:-1]} cannot be loaded: {difference}; give the options of its training, or train from "
                    "its weights with --finetune-from-model"
                )
            logger.warning(f"{prefix[:-1]} starts anew: {difference}")
            for key in theirs:
                del state_dict[key]
            state_dict.update(own)


class MegaEncoderModel(HeadedEncoder):
    """A bidirectional encoder with the interface of fairseq's RoBERTa; `--arch mega_encoder` builds it.

    Its tensors are `encoder.*` as in MegaClassifier, `encoder.embed_types.weight` with --token-types,
    `encoder.lm_head.{dense.weight,dense.bias,layer_norm.weight,layer_norm.bias,weight,bias}` and
    `classification_heads.NAME.{dense,out_proj}.{weight,bias}`. --lm-head gelu has all tensors of the language model
    head, tanh has no layer_norm, linear neither that nor dense; without --untie-lm-head, its weight is
    `encoder.embed_tokens.weight`.
    """

    OPTIONS = MegaEncoderConfig

    @classmethod
    def build_model(cls, cfg: MegaEncoderConfig, task: FairseqTask) -> "MegaEncoderModel":
        if isinstance(task, TranslationTask):
            raise ValueError(
                "--arch mega_encoder has no decoder for --task translation; choose an --arch that starts with "
                "mega_transformer"
            )
        dictionary = task.source_dictionary
        if dictionary is None:
            raise ValueError(
                "--arch mega_encoder reads tokens, and the inputs are numbers; give --arch mega_classifier"
            )
        cls.check_options(cfg, task)
        if getattr(task.cfg, "mask_whole_words", False):
            task.args = option_of_command(cfg, "bpe")  # which fairseq's task reads and does not set
            if task.args is None:
                raise ValueError("--mask-whole-words needs the beginnings of words; give --bpe, as in preprocessing")
        if is_training(cfg):
            task.get_batch_iterator = partial(_iterator_of_epoch, task.get_batch_iterator)
        embed_tokens = token_embedding(dictionary, cfg.encoder_embed_dim, cfg.encoder_embed_path)
        encoder = MegaEncoder(cfg, dictionary, embed_tokens, cfg.max_positions)
        tokens = getattr(task.cfg, "tokens_per_sample", 0)
        if tokens > encoder.max_positions():  # fairseq would leave out longer inputs
            raise ValueError(
                f"--max-positions is {cfg.max_positions} and --tokens-per-sample {tokens}; make them equal"
            )
        encoder.lm_head = None
        if cfg.lm_head != "none":
            weight = None if cfg.untie_lm_head else embed_tokens.weight
            encoder.lm_head = LanguageModelHead(str(cfg.lm_head), cfg.encoder_embed_dim, len(dictionary), weight)
        model = cls(cfg, encoder)
        check_start(model, cfg, task)
        return model

    def register_classification_head(
        self, name: str, num_classes: Optional[int] = None, inner_dim: Optional[int] = None, **unused: Any
    ) -> None:
        """Adds a head, as fairseq's tasks do."""
        cfg, dim = self.cfg, self.cfg.encoder_embed_dim
        self.classification_heads[name] = SentenceHead(
            dim, inner_dim or dim, num_classes, cfg.pooler_dropout, str(cfg.pooling)
        )

    def heads(self) -> Dict[str, nn.Module]:
        lm_head = self.encoder.lm_head
        return {**super().heads(), **({} if lm_head is None else {"encoder.lm_head.": lm_head})}

    def forward(
        self,
        src_tokens: Tensor,
        features_only: bool = False,
        return_all_hiddens: bool = False,
        classification_head_name: Optional[str] = None,
        masked_tokens: Optional[Tensor] = None,
        token_types: Optional[Tensor] = None,
        token_embeddings: Optional[Tensor] = None,
        **unused: Any,
    ) -> Tuple[Tensor, Dict[str, Any]]:
        """Tokens (B, L), padded on any side -> scores (B, L, V) of the language model head, or of masked tokens (N, V).

        With the name of a classification head, its scores (B, classes); with `features_only`, features (B, L, D).
        `token_types` (B, L) are all 0 by default. `token_embeddings` (B, L, D) replace those of the tokens.
        """
        padding = src_tokens.eq(self.encoder.padding_idx)
        inputs = src_tokens if token_embeddings is None else token_embeddings
        encoded = self.encoder.encode(inputs, padding, return_all_hiddens, token_types)
        extra = {"inner_states": None}
        if return_all_hiddens:
            extra["inner_states"] = [encoded.with_pads(x).transpose(0, 1) for x in encoded.states]
        if classification_head_name is not None:
            return self.classification_heads[classification_head_name](encoded.x), extra
        x = encoded.with_pads(encoded.x)
        if features_only:
            return x, extra
        if self.encoder.lm_head is None:
            raise ValueError("the model has no language model head, since it was built with --lm-head none")
        return self.encoder.lm_head(x, masked_tokens), extra

    def get_normalized_probs(
        self, net_output: Tuple[Tensor, Any], log_probs: bool, sample: Optional[Dict[str, Any]] = None
    ) -> Tensor:
        scores = net_output[0].float()
        return scores.log_softmax(-1) if log_probs else scores.softmax(-1)

    @classmethod
    def interface(cls, cfg: Any, task: FairseqTask, models: List[BaseFairseqModel]) -> RobertaHubInterface:
        """fairseq's interface of RoBERTa, in eval mode.

        Without `bpe`, in the checkpoint or in the options, text consists of symbols separated by spaces.
        """
        roberta = RobertaHubInterface(cfg, task, models[0]).eval()
        if roberta.bpe is None:
            roberta.bpe = SimpleNamespace(encode=str, decode=_decoded)
        return roberta


def _iterator_of_epoch(make: Callable[..., EpochBatchIterator], *args: Any, **options: Any) -> EpochBatchIterator:
    """A new iterator: processes that load data would go on with masks of the first epoch."""
    return without_old_workers(make(*args, **{**options, "disable_iterator_cache": True}))


def _decoded(symbols: str) -> str:
    """A single symbol gets a space: `fill_mask` puts it in the place of a mask and the space before it."""
    return symbols if " " in symbols else f" {symbols}"
