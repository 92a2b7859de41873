"""Language modelling on segments of varying length, evaluated on streams with carried state."""

import logging
import os
import re
from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Tuple

import numpy as np
import torch
from fairseq import utils
from fairseq.criterions import FairseqCriterion
from fairseq.data import (
    AppendTokenDataset,
    Dictionary,
    FairseqDataset,
    IdDataset,
    ListDataset,
    NestedDictionaryDataset,
    NumelDataset,
    PadDataset,
    PrependTokenDataset,
    StripTokenDataset,
)
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.models import BaseFairseqModel
from fairseq.optim import FairseqOptimizer
from fairseq.sequence_generator import SequenceGenerator
from fairseq.tasks import FairseqTask, register_task
from omegaconf import II
from torch import Tensor

from mega_fairseq.data.batches import beginning
from mega_fairseq.data.corpus import DOCUMENTS, Corpus
from mega_fairseq.data.segments import SegmentDataset
from mega_fairseq.data.streams import StreamDataset, check_valid_block, stream_bounds
from mega_fairseq.models.language_decoder import MegaLanguageDecoder
from mega_fairseq.models.options import UNBOUNDED, check_at_most, option

logger = logging.getLogger(__name__)


@dataclass
class MegaLanguageModelingConfig(FairseqDataclass):
    data: Optional[str] = option(None, "folder that fairseq-preprocess wrote; several, separated by :, take turns")
    documents: ChoiceEnum(list(DOCUMENTS)) = option(
        "stream", "where documents end: nowhere, at each line, or at each blank line"
    )
    tokens_per_sample: int = option(0, "tokens in a chunk of training segments; 0 takes the model's chunk size")
    variant_block_multiple_min: int = option(1, "training segments have at least this many chunks")
    variant_block_multiple_max: int = option(1, "training segments have at most this many chunks")
    valid_block: str = option(
        "documents",
        "streams to evaluate: documents (the whole split where they end nowhere), splits:K, size:N tokens each",
    )
    seed: int = II("common.seed")


@register_task("mega_language_modeling", dataclass=MegaLanguageModelingConfig)
class MegaLanguageModelingTask(FairseqTask):
    """Trains on segments, validates and tests on streams, generates from prefixes."""

    def __init__(self, cfg: MegaLanguageModelingConfig, dictionary: Dictionary):
        super().__init__(cfg)
        _check(cfg)
        self.dictionary = dictionary
        self.chunk = cfg.tokens_per_sample
        self.adaptive = False  # whether the model's softmax is

    @classmethod
    def setup_task(cls, cfg: MegaLanguageModelingConfig, **unused: Any) -> "MegaLanguageModelingTask":
        if not cfg.data:
            raise ValueError("there is no data; give the folder that fairseq-preprocess wrote")
        path = os.path.join(utils.split_paths(cfg.data)[0], "dict.txt")
        if not os.path.exists(path):
            raise FileNotFoundError(
                f"there is no {path}; give the folder that fairseq-preprocess --only-source wrote (--destdir), "
                "or, for --lm-path, copy the target's dictionary there under that name"
            )
        return cls(cfg, Dictionary.load(path))

    @property
    def source_dictionary(self) -> Dictionary:
        return self.dictionary

    @property
    def target_dictionary(self) -> Dictionary:
        return self.dictionary

    def build_model(self, cfg: FairseqDataclass, from_checkpoint: bool = False) -> BaseFairseqModel:
        model = super().build_model(cfg, from_checkpoint)
        if not isinstance(getattr(model, "decoder", None), MegaLanguageDecoder):
            raise ValueError(
                f"--task mega_language_modeling carries a state through streams, which {type(model).__name__} has not; "
                "choose an --arch that starts with mega_lm, or --task language_modeling"
            )
        self.chunk = self.cfg.tokens_per_sample or max(0, cfg.decoder_chunk_size)
        if not from_checkpoint:  # it is to be trained
            self._check_chunk()
        self.adaptive = model.decoder.adaptive_softmax is not None
        return model

    def _check_chunk(self) -> None:
        if not self.chunk:
            raise ValueError(
                "segments have no chunk to be multiples of: --decoder-chunk-size is -1, or no model was built; "
                "give --tokens-per-sample"
            )

    def build_criterion(self, cfg: FairseqDataclass, **options: Any) -> FairseqCriterion:
        """What fairseq's criteria would find out in the first update, one of them without a word."""
        name = getattr(cfg, "_name", None)
        if self.adaptive and name in ("cross_entropy", "label_smoothed_cross_entropy"):
            raise ValueError(
                f"--criterion {name} asks for the probability of every type, which an adaptive softmax does not train; "
                "choose mega_lm_cross_entropy, or leave out --adaptive-softmax-cutoff"
            )
        if not self.adaptive and name == "adaptive_loss":
            raise ValueError(
                "--criterion adaptive_loss is for an adaptive softmax; choose mega_lm_cross_entropy, or give "
                "--adaptive-softmax-cutoff"
            )
        return super().build_criterion(cfg, **options)

    def train_step(
        self,
        sample: Dict[str, Any],
        model: BaseFairseqModel,
        criterion: FairseqCriterion,
        optimizer: FairseqOptimizer,
        update_num: int,
        ignore_grad: bool = False,
    ) -> Tuple[Tensor, int, Dict[str, Any]]:
        """A process that has run out of batches works on one for nothing, which may be all of the validation set.

        That is read in pieces, but trained on all at once: a chunk of it does as well.
        """
        if ignore_grad:
            sample = beginning(sample, self.chunk)
        return super().train_step(sample, model, criterion, optimizer, update_num, ignore_grad)

    # ------------------------------------------------------------------------------------------ data

    def load_dataset(self, split: str, epoch: int = 1, combine: bool = False, **options: Any) -> None:
        """Segments for what is trained on, whatever its name, and for train (and train1, ...); else streams."""
        folders = utils.split_paths(self.cfg.data)
        folder = folders[(epoch - 1) % len(folders)]
        corpus = Corpus.load(os.path.join(folder, split), self.dictionary, combine)
        documents = corpus.documents(str(self.cfg.documents))
        ends = (self.dictionary.pad(), self.dictionary.eos())
        by_trainer = "data_selector" in options  # fairseq's trainer says it, and nothing else does
        if not by_trainer and not re.fullmatch(r"train\d*", split):
            if self.cfg.valid_block != "documents" and str(self.cfg.documents) != "stream":
                logger.warning(
                    f"--valid-block {self.cfg.valid_block} makes streams of {split} that go on over the ends of its "
                    f"documents, --documents {self.cfg.documents} or not; --valid-block documents ends them there"
                )
            self.datasets[split] = StreamDataset(corpus, stream_bounds(self.cfg.valid_block, documents), *ends)
            return
        if by_trainer and isinstance(self.datasets.get(split), StreamDataset):
            logger.warning(
                f"{split} is both trained on and validated with: its validation is of segments, each with a state of "
                "its own, and not of streams"
            )
        self._check_chunk()
        multiples = (self.cfg.variant_block_multiple_min, self.cfg.variant_block_multiple_max)
        self.datasets[split] = SegmentDataset(corpus, documents, self.chunk, multiples, self.cfg.seed, *ends)

    def filter_indices_by_size(
        self,
        indices: np.ndarray,
        dataset: FairseqDataset,
        max_positions: Any = None,
        ignore_invalid_inputs: bool = False,
    ) -> np.ndarray:
        """fairseq leaves out segments that are too long, and says so in passing: here they are an error."""
        if isinstance(dataset, SegmentDataset):
            remedy = "raise --max-tokens, or lower --variant-block-multiple-max or the chunk size"
        elif isinstance(dataset, StreamDataset):
            remedy = "--valid-block size:N gives shorter streams"
        else:
            return super().filter_indices_by_size(indices, dataset, max_positions, ignore_invalid_inputs)
        if max_positions is not None and dataset.longest > max_positions:
            raise ValueError(
                f"samples have up to {dataset.longest:,} tokens, --max-tokens and the model allow "
                f"{int(max_positions):,}: {remedy}"
            )
        return indices

    def eval_lm_dataloader(
        self,
        dataset: FairseqDataset,
        max_tokens: Optional[int] = None,
        batch_size: Optional[int] = None,
        context_window: int = 0,
        **options: Any,
    ) -> Any:
        """What fairseq-eval-lm reads."""
        if context_window:
            raise ValueError(
                "--context-window is for models without a state; here every token has all of its stream as context, "
                "and --valid-block says how long streams are: leave it out"
            )
        if not isinstance(dataset, StreamDataset):
            raise ValueError(
                "--gen-subset is a training split, which each epoch cuts into other segments; give valid or test, "
                "or evaluate all of it with mega-fairseq sweep"
            )
        limits = {"max_tokens": max_tokens, "max_sentences": batch_size}
        scored = dataset.for_scoring()
        batches = self.get_batch_iterator(scored, disable_iterator_cache=True, **limits, **options)
        return batches.next_epoch_itr(shuffle=False)

    # ------------------------------------------------------------------------------------ generation

    def build_dataset_for_inference(
        self, src_tokens: List[Tensor], src_lengths: List[int], **unused: Any
    ) -> FairseqDataset:
        """Texts of fairseq-interactive and the hub: prefixes to continue, or sentences to score."""
        dictionary = self.dictionary
        texts = StripTokenDataset(ListDataset(src_tokens, src_lengths), dictionary.eos())
        sources = PrependTokenDataset(texts, dictionary.eos())
        targets = AppendTokenDataset(texts, dictionary.pad())

        def padded(dataset: FairseqDataset) -> PadDataset:
            return PadDataset(dataset, pad_idx=dictionary.pad(), left_pad=False)

        net_input = {"src_tokens": padded(sources), "src_lengths": NumelDataset(sources, reduce=False)}
        net_input["target"] = padded(targets)  # a scorer asks for no other type's probability
        samples = {"id": IdDataset(), "net_input": net_input, "target": padded(targets)}
        return NestedDictionaryDataset(samples, sizes=[np.array(src_lengths)])

    def inference_step(
        self,
        generator: Any,
        models: List[BaseFairseqModel],
        sample: Dict[str, Any],
        prefix_tokens: Optional[Tensor] = None,
        constraints: Optional[Tensor] = None,
    ) -> Any:
        """Continues what stands in `prefix_tokens`, or else the texts themselves."""
        if constraints is not None:
            raise ValueError("--constraints is for translation; leave it out")
        eos, sources = self.dictionary.eos(), sample["net_input"]["src_tokens"]
        if prefix_tokens is None and sources.numel():
            prefix_tokens = sources[:, 1:]  # behind the eos that starts a text
        with torch.no_grad():
            if prefix_tokens is None or not isinstance(generator, SequenceGenerator):
                return generator.generate(models, sample, prefix_tokens=prefix_tokens, bos_token=eos)
            return self._go_on(generator, models, sources, self._prefixes(prefix_tokens))

    def _go_on(
        self, generator: SequenceGenerator, models: List[BaseFairseqModel], sources: Tensor, prefixes: Tensor
    ) -> List[Any]:
        """Texts (B, L) with their prefixes, side by side only where company changes nothing.

        As long as any row is within its prefix, fairseq's search forgets --min-len for all of them; and by
        --max-len-a a text may become as long as the longest source allows.
        """
        pad, eos = self.dictionary.pad(), self.dictionary.eos()
        given, lengths = prefixes.ne(pad).sum(1), sources.ne(pad).sum(1)
        kinds = lengths if generator.max_len_a else given.clamp(max=generator.min_len)
        found: List[Any] = [None] * len(sources)
        for kind in kinds.unique():
            rows = (kinds == kind).nonzero().squeeze(1)
            length, needed = int(lengths[rows].max()), int(given[rows].max())
            longest = min(int(generator.max_len_a * length + generator.max_len_b), generator.max_len - 1)
            if needed > longest:
                raise ValueError(
                    f"a prefix has {needed} tokens and a text ends at {longest}; "
                    "raise --max-len-b, as far as the model allows"
                )
            part = {"net_input": {"src_tokens": sources[rows, :length], "src_lengths": lengths[rows]}}
            texts = generator.generate(models, part, prefix_tokens=prefixes[rows, :needed], bos_token=eos)
            for row, text in zip(rows.tolist(), texts):
                found[row] = text
        return found

    def _prefixes(self, tokens: Tensor) -> Tensor:
        """Texts (B, L) to continue, without the ends of those that are shorter: to fairseq's search an end is final."""
        ends, pad = tokens == self.dictionary.eos(), self.dictionary.pad()
        if (ends[:, :-1] & (tokens[:, 1:] != pad)).any():
            raise ValueError(
                "a prefix reaches over the end of a line, where fairseq's search stops; give --documents line "
                "--valid-block documents, or --prefix-size N for the first N tokens of each text"
            )
        return tokens.masked_fill(ends, pad)


def _check(cfg: MegaLanguageModelingConfig) -> None:
    least, most = cfg.variant_block_multiple_min, cfg.variant_block_multiple_max
    if not 1 <= least <= most:
        raise ValueError(
            f"--variant-block-multiple-min is {least} and --variant-block-multiple-max {most}; "
            "give whole numbers from 1 on, the first not above the second"
        )
    if cfg.tokens_per_sample < 0:
        raise ValueError(
            f"--tokens-per-sample less --context-window is {cfg.tokens_per_sample}; give a number of tokens, or 0 for "
            "a chunk, and no --context-window, which is for models without a state"
        )
    check_at_most(UNBOUNDED, variant_block_multiple_max=most, tokens_per_sample=cfg.tokens_per_sample)
    check_valid_block(cfg.valid_block)
