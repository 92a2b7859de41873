"""Builds the models to measure as fairseq-train does, with random weights and an artificial dictionary."""

import re
from argparse import Namespace
from copy import deepcopy
from functools import lru_cache
from typing import Any, Dict, List, Optional, Tuple

import torch
from fairseq import options
from fairseq.data import Dictionary
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import BaseFairseqModel, build_model
from fairseq.tasks import TASK_DATACLASS_REGISTRY, TASK_REGISTRY, FairseqTask
from fairseq.tasks.translation import TranslationTask
from omegaconf import DictConfig
from torch import Tensor

import mega_fairseq.criterions
import mega_fairseq.models
import mega_fairseq.tasks  # noqa: F401 - importing them registers them

BYTES = 208  # types of bytes, as in mega_lm_enwik8
NO_DROPOUT = ["--dropout=0", "--attention-dropout=0", "--activation-dropout=0"]


def dictionary(types: int) -> Dictionary:
    words = Dictionary()
    for index in range(types - len(words)):
        words.add_symbol(f"w{index}")
    return words


def given(words: List[str]) -> Namespace:
    return options.parse_args_and_arch(options.get_training_parser(), ["data", *words])


def dictionaries(task: str, types: int) -> List[Dictionary]:
    return [dictionary(types) for _ in range(2 if issubclass(TASK_REGISTRY[task], TranslationTask) else 1)]


def configured(words: List[str], types: int) -> Tuple[Any, FairseqTask, BaseFairseqModel]:
    """What fairseq-train makes of these arguments, with a dictionary of this many types: configuration, task, model."""
    cfg = deepcopy(configuration(*words))
    name = cfg.task._name
    task = TASK_REGISTRY[name](cfg.task, *dictionaries(name, types))
    return cfg, task, build_model(cfg.model, task)


@lru_cache(maxsize=None)
def configuration(*words: str) -> DictConfig:
    """What fairseq makes of these arguments in half a second."""
    args = given(list(words))
    args.tpu = False  # fairseq takes --bf16 for a TPU
    return convert_namespace_to_omegaconf(args)


def built(words: List[str], types: int) -> Tuple[FairseqTask, BaseFairseqModel]:
    """The same task and model without the configuration."""
    args = given(words)
    task = with_options(args, *dictionaries(args.task, types))
    return task, build_model(args, task)


def from_args(words: List[str], types: int) -> BaseFairseqModel:
    return built(words, types)[1]


def classifier(words: List[str], kind: str, dictionary: Optional[Dictionary], classes: List[str]) -> BaseFairseqModel:
    """The same for the task `mega_classification`."""
    args = given(["--task=mega_classification", "--criterion=sentence_prediction", f"--input-kind={kind}", *words])
    return with_options(args, dictionary, classes).build_model(args)


def with_options(args: Namespace, *known: Any) -> FairseqTask:
    return TASK_REGISTRY[args.task](TASK_DATACLASS_REGISTRY[args.task].from_namespace(args), *known)


def used_size(model: BaseFairseqModel) -> int:
    """Number of parameters that are used.

    The Transformer of fairseq 0.12.2 has a second, unused set in its encoder.
    """
    unused = re.compile(r"encoder\.(\w+\.)?layers\.\d+\.(in_proj|out_proj|fc1|fc2)_(weight|bias)")
    return sum(p.numel() for name, p in model.named_parameters() if not unused.fullmatch(name))


def like_words(types: int, count: int) -> Tensor:
    """Random types, distributed by Zipf's law, without the special ones (0-3)."""
    chances = 1 / torch.arange(1, types - 3, dtype=torch.float64)
    return torch.multinomial(chances, count, replacement=True, generator=torch.Generator().manual_seed(1)) + 4


def random_batch(model: BaseFairseqModel, rows: int, length: int) -> Dict[str, Tensor]:
    """Arguments of a translation or language model for sequences without pads."""
    torch.manual_seed(1)
    source, before = (torch.randint(4, len(model.decoder.dictionary), (rows, length)) for _ in range(2))
    if not hasattr(model, "encoder"):
        return {"src_tokens": source}
    return {"src_tokens": source, "src_lengths": torch.full((rows,), length), "prev_output_tokens": before}
