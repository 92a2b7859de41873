"""Language modelling: training on segments of varying length, evaluation on long streams with carried state."""

import logging
import os
import re
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Optional, Tuple

import numpy as np
import torch
from fairseq import utils
from fairseq.criterions import FairseqCriterion
from fairseq.data import Dictionary, EpochBatchIterator, FairseqDataset
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.distributed import utils as distributed_utils
from fairseq.models import BaseFairseqModel
from fairseq.optim import FairseqOptimizer
from fairseq.sequence_generator import SequenceGenerator
from fairseq.sequence_scorer import SequenceScorer
from fairseq.tasks import FairseqTask, register_task
from omegaconf import II
from torch import Tensor

from mega_fairseq.data.batches import TextDataset, beginning
from mega_fairseq.data.corpus import DOCUMENTS, Corpus
from mega_fairseq.data.loading import without_old_workers
from mega_fairseq.data.segments import SegmentDataset
from mega_fairseq.data.streams import StreamDataset, parse_valid_block, stream_bounds
from mega_fairseq.data.words import check_words
from mega_fairseq.fairseq_options import check_ranges, option, typed
from mega_fairseq.ops.sequence_parallel import SequenceGroup
from mega_fairseq.tasks.continuation import continue_texts
from mega_fairseq.tasks.generator import generator_class
from mega_fairseq.tasks.types_of_training import check_types, state_of

logger = logging.getLogger(__name__)


@dataclass
class MegaLanguageModelingConfig(FairseqDataclass):
    """Options of language modelling."""

    data: Optional[str] = option(
        None, "folder that fairseq-preprocess wrote; several, separated by :, take turns epoch by epoch"
    )
    documents: ChoiceEnum(list(DOCUMENTS)) = option(
        "stream", "where documents end: stream (nowhere), line (at each line) or blank (at each blank line)"
    )
    tokens_per_sample: int = option(0, "tokens in a chunk of training segments; 0 takes the model's chunk size")
    variant_block_multiple_min: int = option(1, "training segments have at least this many chunks", least=1)
    variant_block_multiple_max: int = option(1, "training segments have at most this many chunks", least=1)
    valid_block: str = option(
        "documents",
        "streams to evaluate: documents (with --documents stream: the whole split, or one part per process), "
        "splits:K of equal length, size:N of N tokens each",
    )
    sequence_parallel_size: int = option(
        1, "how many neighbouring processes share each segment and stream, with a slice of it in each", least=1
    )
    seed: int = II("common.seed")


@register_task("mega_language_modeling", dataclass=MegaLanguageModelingConfig)
class MegaLanguageModelingTask(FairseqTask):
    """Trains on segments, validates and tests on streams, generates continuations of prefixes."""

    def __init__(self, cfg: MegaLanguageModelingConfig, dictionary: Dictionary):
        super().__init__(cfg)
        if cfg.tokens_per_sample < 0:
            raise ValueError(
                f"--tokens-per-sample minus --context-window is {cfg.tokens_per_sample}; leave out --context-window, "
                "which is for models without state"
            )
        check_ranges(cfg, MegaLanguageModelingConfig)
        least, most = cfg.variant_block_multiple_min, cfg.variant_block_multiple_max
        if least > most:
            raise ValueError(f"--variant-block-multiple-min is {least}, above --variant-block-multiple-max {most}")
        parse_valid_block(cfg.valid_block)
        self.dictionary = dictionary
        self.chunk = cfg.tokens_per_sample
        self.group: Optional[SequenceGroup] = None  # the processes that share each sequence

    @classmethod
    def setup_task(cls, cfg: MegaLanguageModelingConfig, **unused: Any) -> "MegaLanguageModelingTask":
        if not cfg.data:
            raise ValueError("there is no data; give the folder that fairseq-preprocess wrote")
        return cls(cfg, Dictionary.load(os.path.join(utils.split_paths(cfg.data)[0], "dict.txt")))

    @property
    def source_dictionary(self) -> Dictionary:
        return self.dictionary

    @property
    def target_dictionary(self) -> Dictionary:
        return self.dictionary

    def state_dict(self) -> Dict[str, Any]:
        """What a checkpoint says of the data: fairseq's entries and the types."""
        return {**super().state_dict(), **state_of(self.dictionary)}

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        """Check the types of a trained model."""
        super().load_state_dict(state_dict)
        check_types(state_dict, self.cfg.data, self.dictionary)

    def build_model(self, cfg: FairseqDataclass, from_checkpoint: bool = False) -> BaseFairseqModel:
        model = super().build_model(cfg, from_checkpoint)
        if not hasattr(getattr(model, "decoder", None), "target_log_probs"):
            raise ValueError(
                f"--task mega_language_modeling carries state through streams, which {type(model).__name__} cannot do; "
                "take a model whose --arch starts with mega_lm, or --task language_modeling for fairseq's"
            )
        self.chunk = self.cfg.tokens_per_sample or max(0, cfg.decoder_chunk_size)
        if not from_checkpoint:  # for training
            self._check_chunk()
        if self.group is None:
            self.group = sequence_group(self.cfg.sequence_parallel_size, for_training=not from_checkpoint)
        if self.group is not None:
            model.decoder.share_sequences(self.group)
            self.unit = max(1, cfg.decoder_chunk_size)
        return model

    def _check_chunk(self) -> None:
        if not self.chunk:
            raise ValueError(
                "training segments are multiples of a chunk and --decoder-chunk-size is -1, or no model was built; "
                "give --tokens-per-sample"
            )

    @property
    def _sharing(self) -> int:
        """How many processes share each sequence."""
        return 1 if self.group is None else self.group.size

    def build_criterion(self, cfg: FairseqDataclass, **options: Any) -> FairseqCriterion:
        name = getattr(cfg, "_name", None)
        if self.group is not None and name != "mega_lm_cross_entropy":
            raise ValueError(
                f"--criterion {name} needs the scores of a whole segment, which --sequence-parallel-size divides among "
                "processes; choose mega_lm_cross_entropy"
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
        """Shorten the dummy batch of a process that has run out of batches.

        fairseq repeats the batch it loaded last, which may be the whole validation set in one stream. Evaluation reads
        a stream in pieces, but training would process it all at once; one chunk is enough.
        """
        if ignore_grad:
            sample = beginning(sample, self.chunk)
        step = super().train_step
        return self._shared(step, sample, model, criterion, optimizer, update_num, ignore_grad)

    def valid_step(
        self, sample: Dict[str, Any], model: BaseFairseqModel, criterion: FairseqCriterion
    ) -> Tuple[Tensor, int, Dict[str, Any]]:
        """fairseq's step, where processes that share sequences count their loss once."""
        return self._shared(super().valid_step, sample, model, criterion)

    def _shared(self, step: Callable[..., Any], *arguments: Any) -> Tuple[Tensor, int, Dict[str, Any]]:
        """Of the processes that share sequences, which all have the same loss, only the first one counts it.

        The gradients of each are those of its slice. fairseq adds up all of these over all processes. It would also
        skip a batch that does not fit into memory, but in this process alone, and the others would wait for it.
        """
        try:
            loss, sample_size, logging_output = step(*arguments)
        except RuntimeError as error:
            if self.group is None or "out of memory" not in str(error):
                raise
            raise RuntimeError(
                "a slice does not fit into the memory of this process; give a smaller --max-tokens, or let more "
                "processes share a segment (--sequence-parallel-size)"
            ) from error
        if self.group is None or self.group.rank == 0:
            return loss, sample_size, logging_output
        return loss, 0 * sample_size, {name: 0 * value for name, value in logging_output.items()}

    # ------------------------------------------------------------------------------------------ data

    def load_dataset(self, split: str, epoch: int = 1, combine: bool = False, **options: Any) -> None:
        """Load segments for the training split, whatever its name, and for train, train1, ...; otherwise streams."""
        folders = utils.split_paths(self.cfg.data)
        folder = folders[(epoch - 1) % len(folders)]
        corpus = Corpus.load(os.path.join(folder, split), self.dictionary, combine)
        documents = corpus.documents(str(self.cfg.documents))
        ends = (self.dictionary.pad(), self.dictionary.eos())
        for_training = "data_selector" in options  # only fairseq's trainer passes it
        if not for_training and not re.fullmatch(r"train\d*", split):
            self.datasets[split] = StreamDataset(corpus, self._stream_bounds(split, documents), *ends)
            return
        self._check_chunk()
        most = self.cfg.variant_block_multiple_max * self.chunk
        if self.group is not None and most < self.group.size * self.unit:
            raise ValueError(
                f"--sequence-parallel-size is {self.group.size} and segments have at most {most:,} tokens, fewer than "
                f"a chunk of {self.unit:,} for each process; raise --variant-block-multiple-max or --tokens-per-sample"
            )
        multiples = (self.cfg.variant_block_multiple_min, self.cfg.variant_block_multiple_max)
        self.datasets[split] = SegmentDataset(corpus, documents, self.chunk, multiples, self.cfg.seed, *ends)

    def _stream_bounds(self, split: str, documents: np.ndarray) -> np.ndarray:
        block, whole = self.cfg.valid_block, str(self.cfg.documents) == "stream"
        processes = distributed_utils.get_data_parallel_world_size() // self._sharing
        if block == "documents" and whole and processes > 1:
            block = f"splits:{processes}"
            logger.info(
                f"{split} is read as {processes} streams, one per process, each without context from the one before; "
                "--valid-block splits:1 reads it as one stream"
            )
        return stream_bounds(block, documents)

    def get_batch_iterator(
        self,
        dataset: FairseqDataset,
        max_tokens: Optional[int] = None,
        max_sentences: Optional[int] = None,
        max_positions: Optional[int] = None,
        num_shards: int = 1,
        shard_id: int = 0,
        **options: Any,
    ) -> EpochBatchIterator:
        """Return fairseq's iterator, with streams spread over all processes instead of packed into few batches.

        Processes that share sequences get the same batches, which may be as many times as large.
        """
        num_shards, shard_id = num_shards // self._sharing, shard_id // self._sharing
        max_tokens, max_positions = (n and n * self._sharing for n in (max_tokens, max_positions))
        if isinstance(dataset, SegmentDataset) and max_tokens:  # fairseq only checks it in training
            self.filter_indices_by_size(None, dataset, max_tokens)
        if isinstance(dataset, StreamDataset) and num_shards > 1:
            share = -(-len(dataset) // num_shards)
            max_sentences = min(max_sentences or share, share)
        limits = {"max_tokens": max_tokens, "max_sentences": max_sentences, "max_positions": max_positions}
        options.update(limits, num_shards=num_shards, shard_id=shard_id)
        return without_old_workers(super().get_batch_iterator(dataset, **options))

    def filter_indices_by_size(
        self,
        indices: np.ndarray,
        dataset: FairseqDataset,
        max_positions: Any = None,
        ignore_invalid_inputs: bool = False,
    ) -> np.ndarray:
        """Raise an error for samples that are too long, where fairseq drops them with a warning."""
        if isinstance(dataset, SegmentDataset):
            remedy = "raise --max-tokens, or lower --variant-block-multiple-max or the chunk size"
        elif isinstance(dataset, StreamDataset):
            remedy = "--valid-block size:N gives shorter streams"
        else:
            return super().filter_indices_by_size(indices, dataset, max_positions, ignore_invalid_inputs)
        if max_positions is not None and dataset.longest > max_positions:
            of_all = f" in each of {self._sharing} processes" if self._sharing > 1 else ""
            raise ValueError(
                f"samples have up to {dataset.longest:,} tokens, --max-tokens and the model allow "
                f"{int(max_positions) // self._sharing:,}{of_all}: {remedy}"
            )
        return indices

    def eval_lm_dataloader(
        self,
        dataset: FairseqDataset,
        max_tokens: Optional[int] = None,
        batch_size: Optional[int] = None,
        context_window: int = 0,
        num_shards: int = 1,
        **options: Any,
    ) -> Any:
        """Return the batches that fairseq-eval-lm scores."""
        if context_window:
            raise ValueError(
                "--context-window is for models without state; here the context of each token is its whole "
                "stream; leave it out, and change the length of streams with --valid-block"
            )
        if not isinstance(dataset, StreamDataset):
            raise ValueError(
                "--gen-subset is a training split, which each epoch cuts into other segments; give valid or test, "
                "or evaluate all of it with mega-fairseq sweep"
            )
        processes = distributed_utils.get_data_parallel_world_size()
        if processes > self._sharing:
            raise ValueError(
                f"fairseq-eval-lm would report only the first of {processes} processes' parts; give "
                f"--sequence-parallel-size {processes}, or run one process"
            )
        if num_shards // self._sharing > len(dataset):
            raise ValueError(
                f"--num-shards is {num_shards} and the split has fewer streams, {len(dataset)}; give --valid-block "
                f"splits:{num_shards}"
            )
        limits = {"max_tokens": max_tokens, "max_sentences": batch_size}
        return self.get_batch_iterator(
            dataset.for_scoring(), num_shards=num_shards, disable_iterator_cache=True, **limits, **options
        ).next_epoch_itr(shuffle=False)

    # ------------------------------------------------------------------------------------ generation

    def build_generator(
        self, models: List[BaseFairseqModel], args: Any, seq_gen_cls: Optional[type] = None, *rest: Any, **options: Any
    ) -> Any:
        for name in ("constraints", "print_alignment"):
            if getattr(args, name, None):
                raise ValueError(f"{typed(name)} is for translation; leave it out")
        return super().build_generator(models, args, seq_gen_cls or generator_class(args), *rest, **options)

    def build_dataset_for_inference(
        self, src_tokens: List[Tensor], src_lengths: List[int], **unused: Any
    ) -> FairseqDataset:
        """Return the texts of fairseq-interactive or the hub: prefixes to continue, or sentences to score."""
        return TextDataset(src_tokens, self.dictionary.pad(), self.dictionary.eos())

    def inference_step(
        self,
        generator: Any,
        models: List[BaseFairseqModel],
        sample: Dict[str, Any],
        prefix_tokens: Optional[Tensor] = None,
        constraints: Optional[Tensor] = None,
    ) -> Any:
        """Score the texts of `sample`, or continue them; `prefix_tokens` replace them as prefixes."""
        if constraints is not None:
            raise ValueError("--constraints is for translation; leave it out")
        eos, pad, sources = self.dictionary.eos(), self.dictionary.pad(), sample["net_input"]["src_tokens"]
        check_words(sources, self.dictionary)
        if isinstance(generator, SequenceScorer) and "target" not in sample:  # fairseq-interactive passes only sources
            target = torch.nn.functional.pad(sources[:, 1:], (0, 1), value=pad)
            sample = {**sample, "target": target, "net_input": {**sample["net_input"], "target": target}}
        if isinstance(generator, SequenceScorer) and sample["target"].eq(pad).all(1).any():
            raise ValueError("a text to score is empty; leave it out")
        if prefix_tokens is None and sources.numel():
            prefix_tokens = sources[:, 1:]  # without the eos that starts a text
        with torch.no_grad():
            if prefix_tokens is None or not isinstance(generator, SequenceGenerator):
                return generator.generate(models, sample, prefix_tokens=prefix_tokens, bos_token=eos)
            return continue_texts(generator, models, sample, prefix_tokens, self.dictionary)


def sequence_group(size: int, for_training: bool) -> Optional[SequenceGroup]:
    """The group of this process: ranks 0 to size - 1, size to 2 size - 1, ... All processes must call this.

    None if processes do not share sequences. A trained model can also be used in one process.
    """
    processes = distributed_utils.get_data_parallel_world_size()
    if size == 1 or processes == 1 and not for_training:
        return None
    if processes % size:
        raise ValueError(
            f"--sequence-parallel-size is {size} and does not divide the number of processes, {processes}; give a "
            "divisor, or a multiple of it as --distributed-world-size"
        )
    ranks = [list(range(first, first + size)) for first in range(0, processes, size)]
    return SequenceGroup(distributed_utils.new_groups(ranks))
