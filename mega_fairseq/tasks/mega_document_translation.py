"""Translation of whole documents, for any fairseq model: windows of several lines, with a separator between them."""

import logging
import os
from argparse import Namespace
from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Tuple

import numpy as np
from fairseq import utils
from fairseq.data import Dictionary, EpochBatchIterator, FairseqDataset, LanguagePairDataset
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.models import BaseFairseqModel
from fairseq.search import BeamSearch
from fairseq.tasks import register_task
from omegaconf import II
from torch import Tensor

from mega_fairseq.data.corpus import part_paths
from mega_fairseq.data.loading import without_old_workers
from mega_fairseq.data.windows import Draw, WindowDataset
from mega_fairseq.documents import SEPARATOR, document_borders, read_lines, separator_symbol
from mega_fairseq.fairseq_options import check_ranges, option, typed
from mega_fairseq.tasks.generator import OPTIONS
from mega_fairseq.tasks.line_counts import LineSearch
from mega_fairseq.tasks.mega_translation import MegaTranslationConfig, MegaTranslationTask
from mega_fairseq.tasks.types_of_training import check_types

logger = logging.getLogger(__name__)

POSITIONS = ("max_source_positions", "max_target_positions")
OF_LINES = ("load_alignments", "truncate_source", "num_batch_buckets", "eval_bleu")


@dataclass
class MegaDocumentTranslationConfig(MegaTranslationConfig):
    """Options of the translation of documents."""

    window_tokens: int = option(1024, "most tokens of a window, on each side", least=1)
    valid_window_tokens: int = option(0, "the same for validation and test; 0 for --window-tokens", least=0)
    single_lines: float = option(0.25, "share of the training documents that each epoch cuts into windows of one line")
    window_lengths: ChoiceEnum(["log-uniform", "full"]) = option(
        "log-uniform",
        "most tokens of the windows of a training document: log-uniform from 64 to --window-tokens, drawn anew for "
        "each document and epoch, or full: always --window-tokens",
    )
    separator: str = option(SEPARATOR, "symbol between the lines of a window, added to both dictionaries")
    sentence_counts: ChoiceEnum(["exact", "free"]) = option(
        "exact", "exact: translate each window into as many lines as it has; free: let the model decide"
    )
    line_length_a: float = option(
        2.0, "with --sentence-counts exact, a line has at most a n + b tokens for n of the source", least=0
    )
    line_length_b: float = option(20, "see --line-length-a", least=0)
    seed: int = II("common.seed")


@register_task("mega_document_translation", dataclass=MegaDocumentTranslationConfig)
class MegaDocumentTranslationTask(MegaTranslationTask):
    """Trains on windows that each epoch cuts anew, validates and tests on fixed ones.

    The data are those of `translation`, with the document of each line in `{split}.docs`.
    """

    def __init__(self, cfg: MegaDocumentTranslationConfig, src_dict: Dictionary, tgt_dict: Dictionary):
        super().__init__(cfg, src_dict, tgt_dict)
        check_ranges(cfg, MegaDocumentTranslationConfig)
        if not 0 <= cfg.single_lines <= 1:
            raise ValueError(f"--single-lines is {cfg.single_lines}; give a share from 0 to 1")
        separator_symbol(cfg.separator)
        for name in OF_LINES:
            if getattr(cfg, name):
                raise ValueError(f"{typed(name)} is for single lines; leave it out, or give --task translation")
        for dictionary, language in ((src_dict, cfg.source_lang), (tgt_dict, cfg.target_lang)):
            if cfg.separator in dictionary:
                raise ValueError(
                    f"dict.{language}.txt contains {cfg.separator}, which would then stand within lines; give another "
                    "--separator, or remove it from the text and run fairseq-preprocess again"
                )
            dictionary.add_symbol(cfg.separator)
            dictionary.pad_to_multiple_(8)  # as fairseq-preprocess does, for GPUs
        for name in POSITIONS:  # models take theirs from here
            setattr(cfg, name, max(getattr(cfg, name), cfg.window_tokens, cfg.valid_window_tokens))

    @property
    def separators(self) -> Tuple[int, int]:
        """Their types in the source and in the target."""
        return self.src_dict.index(self.cfg.separator), self.tgt_dict.index(self.cfg.separator)

    def state_dict(self) -> Dict[str, Any]:
        """What a checkpoint says of the data: fairseq's entries and the separator of lines."""
        return {**super().state_dict(), "separator": self.cfg.separator}

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        """Check the separator and the types of a trained model."""
        separator = state_dict.get("separator")
        if separator != self.cfg.separator:
            trained = "without a separator" if separator is None else f"with --separator {separator}"
            remedy = "give --task translation" if separator is None else "give the same"
            raise ValueError(
                f"the model was trained {trained} and --separator is {self.cfg.separator}; {remedy}, or train a model "
                "with --task mega_document_translation"
            )
        check_types(state_dict, self.cfg.data, self.src_dict, self.tgt_dict)

    def build_model(self, cfg: FairseqDataclass, from_checkpoint: bool = False) -> BaseFairseqModel:
        for name in POSITIONS:  # of models that have options of their own on the command line
            own = getattr(cfg, name, None)  # fairseq's Transformers get their default later
            if not from_checkpoint and (isinstance(own, int) or isinstance(cfg, Namespace)):
                setattr(cfg, name, max(own or 0, getattr(self.cfg, name)))
        return super().build_model(cfg, from_checkpoint)

    # ------------------------------------------------------------------------------------------ search

    def build_generator(self, models: List[BaseFairseqModel], args: Any, *rest: Any, **options: Any) -> Any:
        generator = super().build_generator(models, args, *rest, **options)
        if self.datasets and not getattr(args, "score_reference", False):
            logger.warning(
                "the BLEU that fairseq prints here counts separators as words; measure lines with mega-fairseq "
                "documents split and score"
            )
        if str(self.cfg.sentence_counts) == "free":
            longest = getattr(args, "max_len_b", 200)
            if not getattr(args, "max_len_a", 0) and longest < self.cfg.window_tokens:
                logger.warning(
                    "--max-len-b ends each translation after %d tokens, and windows have up to %d; give --max-len-a 2, "
                    "too",
                    longest,
                    self.cfg.window_tokens,
                )
        elif not getattr(args, "score_reference", False):
            kind = type(generator.search)
            others = {
                OPTIONS.get(kind, kind.__name__): kind is not BeamSearch,
                "--prefix-size": getattr(args, "prefix_size", 0),
                "--min-len": generator.min_len > 1,
                "--no-repeat-ngram-size": generator.repeat_ngram_blocker is not None,
            }
            for name in filter(others.get, others):
                raise ValueError(f"--sentence-counts exact does not support {name}; leave it out, or give free")
            generator.search = LineSearch(
                self.target_dictionary, self.separators, self.cfg.line_length_a, self.cfg.line_length_b
            )
        return generator

    def inference_step(self, generator: Any, models: List[BaseFairseqModel], sample: Any, *rest: Any, **options: Any):
        """Translates a batch, with the limits of its lines."""
        search = getattr(generator, "search", None)
        if not isinstance(search, LineSearch):
            return super().inference_step(generator, models, sample, *rest, **options)
        limit = generator.max_len - 1
        longest = search.begin(sample["net_input"]["src_tokens"], limit)
        generator.max_len_a, generator.max_len_b = 0, longest  # instead of --max-len-a and --max-len-b
        hypotheses = super().inference_step(generator, models, sample, *rest, **options)
        shortened = longest == limit and sum(len(each[0]["tokens"]) > limit for each in hypotheses if each)
        if shortened:
            logger.warning(
                "the last lines of %d windows were shortened, since the model writes at most %d tokens; lower "
                "--window-tokens, or train it with more --max-target-positions",
                shortened,
                limit,
            )
        return hypotheses

    # ------------------------------------------------------------------------------------------ data

    def load_dataset(self, split: str, epoch: int = 1, combine: bool = False, **options: Any) -> None:
        """Load windows that each epoch draws anew for the training, whatever the name of its split; else fixed ones."""
        super().load_dataset(split, epoch, combine, **options)
        folders = utils.split_paths(self.cfg.data)
        folder = folders[(epoch - 1) % len(folders) if split == self.cfg.train_subset else 0]
        for_training = "data_selector" in options  # only fairseq's trainer passes it
        lines = self.datasets[split]
        limit, limiting = self.cfg.window_tokens, "--window-tokens"
        if not for_training and self.cfg.valid_window_tokens:
            limit, limiting = self.cfg.valid_window_tokens, "--valid-window-tokens"
        for sizes, language in ((lines.src_sizes, self.cfg.source_lang), (lines.tgt_sizes, self.cfg.target_lang)):
            if sizes is not None and sizes.max() > limit:
                raise ValueError(
                    f"line {sizes.argmax() + 1:,} of {split}.{language} has {sizes.max():,} tokens and {limiting} is "
                    f"{limit:,}; give at least {sizes.max():,}, or remove such lines"
                )
            if sizes is not None and sizes.min() < 2:  # only eos
                raise ValueError(
                    f"line {sizes.argmin() + 1:,} of {split}.{language} is blank; remove it, and the same line of the "
                    "other files, before fairseq-preprocess"
                )
        documents = self._documents(folder, split, combine, len(lines))
        full = str(self.cfg.window_lengths) == "full"
        draw = Draw(self.cfg.seed, self.cfg.single_lines, full) if for_training else None
        self.datasets[split] = WindowDataset(lines, documents, limit, self.separators, draw)

    def _documents(self, folder: str, split: str, combine: bool, lines: int) -> np.ndarray:
        """Borders of documents; with `combine` also those of split1, split2, ..."""
        path = os.path.join(folder, f"{split}.docs")
        if not os.path.exists(path):
            raise FileNotFoundError(
                f"there is no {path}, which has the document of each line; copy it from the folder that mega-fairseq "
                "prepare documents wrote"
            )
        parts = part_paths(os.path.join(folder, split), combine, lambda part: os.path.exists(f"{part}.docs"))
        ids = [name for part in parts for name in read_lines(f"{part}.docs")]
        if len(ids) != lines:
            in_parts = combine and any(name.startswith(f"{split}1.") for name in os.listdir(folder))
            raise ValueError(
                f"{path} has {len(ids):,} lines and {split} has {lines:,}; give one id for each line of the data, in "
                "the same order" + f", those of {split}1 in {split}1.docs, and --upsample-primary 1" * in_parts
            )
        return np.array(document_borders(ids, path))

    def get_batch_iterator(
        self, dataset: FairseqDataset, max_tokens: Optional[int] = None, *rest: Any, **options: Any
    ) -> EpochBatchIterator:
        """Return fairseq's iterator if the longest window fits into a batch."""
        longest = longest_window(dataset)
        if max_tokens and longest > max_tokens:
            raise ValueError(
                f"windows have up to {longest:,} tokens and --max-tokens is {max_tokens:,}; raise it, or lower "
                "--window-tokens"
            )
        return without_old_workers(super().get_batch_iterator(dataset, max_tokens, *rest, **options))

    def filter_indices_by_size(
        self,
        indices: np.ndarray,
        dataset: FairseqDataset,
        max_positions: Any = None,
        ignore_invalid_inputs: bool = False,
    ) -> np.ndarray:
        """Raise an error for windows that are too long, where fairseq drops them with a warning."""
        longest, least = longest_window(dataset), int(np.min(max_positions))
        if longest > least:
            raise ValueError(
                f"windows have up to {longest:,} tokens and the model reads {least:,}; lower --window-tokens or "
                "--valid-window-tokens (fairseq-interactive: raise it), shorten longer lines, or train the model "
                "with larger windows and --rel-pos-bias rotary"
            )
        return indices

    def windows(self, documents: List[List[Tensor]]) -> List[Tensor]:
        """Cut documents, lists of encoded lines, into windows as for tests."""
        lines = [line for document in documents for line in document]
        if any((line == self.separators[0]).any() for line in lines):
            raise ValueError(f"a line contains {self.cfg.separator}, which stands between lines; remove it")
        if not lines:
            return []
        pairs = LanguagePairDataset(lines, list(map(len, lines)), self.source_dictionary)
        borders = np.cumsum([0, *map(len, documents)])
        limit = self.cfg.valid_window_tokens or self.cfg.window_tokens
        (sources,) = WindowDataset(pairs, borders, limit, self.separators).joined
        return [sources[number] for number in range(len(sources))]


def longest_window(dataset: FairseqDataset) -> int:
    """The most tokens of a window; for fairseq-interactive, each document is one."""
    return dataset.longest if isinstance(dataset, WindowDataset) else int(np.max(dataset.sizes))
