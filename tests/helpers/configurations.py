"""Model configurations as fairseq makes them from a command line and with hydra, and options to give them."""

from typing import Any, Dict

from fairseq import options
from fairseq.dataclass.configs import FairseqConfig
from fairseq.dataclass.initialize import add_defaults
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from omegaconf import DictConfig, OmegaConf, open_dict

import mega_fairseq.criterions
import mega_fairseq.models
import mega_fairseq.optim
import mega_fairseq.tasks  # noqa: F401 - importing them registers them


def training(*words: str) -> DictConfig:
    """The whole configuration as fairseq-train parses it."""
    return convert_namespace_to_omegaconf(options.parse_args_and_arch(options.get_training_parser(), list(words)))


def parsed(*words: str) -> DictConfig:
    """The model's configuration as fairseq-train parses it."""
    return training("data", *words).model


def under_hydra(task: str, criterion: str = "cross_entropy", **model: Any) -> DictConfig:
    """The model's configuration as fairseq-hydra-train completes it."""
    cfg = OmegaConf.structured(FairseqConfig())
    with open_dict(cfg):
        cfg.model, cfg.task = model, {"_name": task, "data": "data"}
        cfg.criterion = {"_name": criterion}
        add_defaults(cfg)
    return cfg.model


def plain(cfg: DictConfig) -> Dict[str, Any]:
    return OmegaConf.to_container(cfg, resolve=True, enum_to_str=True)
