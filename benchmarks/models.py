"""Models to measure: presets with random weights and an artificial dictionary."""

import re
from argparse import Namespace
from typing import Any, List, Optional

from fairseq import options
from fairseq.data import Dictionary
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import MODEL_DATACLASS_REGISTRY, MODEL_REGISTRY, BaseFairseqModel, build_model

import mega_fairseq.criterions
import mega_fairseq.models
import mega_fairseq.tasks  # noqa: F401 - importing them registers them
from mega_fairseq.tasks import MegaClassificationTask


def task(types: int) -> Namespace:
    """The part of a task that building a model needs: a dictionary with this many types."""
    words = Dictionary()
    for index in range(types - len(words)):
        words.add_symbol(f"w{index}")
    return Namespace(source_dictionary=words, target_dictionary=words)


def preset(name: str, task: Namespace, **options: Any) -> BaseFairseqModel:
    """A preset in eval mode, with some options changed."""
    cfg = MODEL_DATACLASS_REGISTRY[name]()
    for option, value in options.items():
        setattr(cfg, option, value)
    return MODEL_REGISTRY[name].build_model(cfg, task).eval()


def used_size(model: BaseFairseqModel) -> int:
    """Number of parameters that are used.

    The Transformer of fairseq 0.12.2 has a second, unused set in its encoder, and `roberta` a language model's head.
    """
    unused = re.compile(r"encoder\.(\w+\.)?layers\.\d+\.(in_proj|out_proj|fc1|fc2)_(weight|bias)|encoder\.lm_head\..*")
    return sum(p.numel() for name, p in model.named_parameters() if not unused.fullmatch(name))


def from_args(words: List[str], types: int) -> BaseFairseqModel:
    """The model that fairseq-train builds from these arguments, with a dictionary of this many types."""
    given = options.parse_args_and_arch(options.get_training_parser(), ["data", *words])
    return build_model(convert_namespace_to_omegaconf(given).model, task(types))


def classifier(words: List[str], kind: str, dictionary: Optional[Dictionary], classes: List[str]) -> BaseFairseqModel:
    """The model that fairseq-train builds from these arguments for the task `mega_classification`."""
    fixed = ["--task=mega_classification", "--criterion=sentence_prediction", f"--input-kind={kind}"]
    given = options.parse_args_and_arch(options.get_training_parser(), ["data", *fixed, *words])
    cfg = convert_namespace_to_omegaconf(given)
    return MegaClassificationTask(cfg.task, dictionary, classes).build_model(cfg.model)
