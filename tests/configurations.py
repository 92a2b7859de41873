"""Model configurations as fairseq makes them from a command line and with hydra."""

from typing import Any, Dict

from fairseq import options
from fairseq.dataclass.configs import FairseqConfig
from fairseq.dataclass.initialize import add_defaults
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from omegaconf import DictConfig, OmegaConf, open_dict


def parsed(*words: str) -> DictConfig:
    """The model's configuration as fairseq-train parses it."""
    arguments = options.parse_args_and_arch(options.get_training_parser(), ["data", *words])
    return convert_namespace_to_omegaconf(arguments).model


def under_hydra(task: str, **model: Any) -> DictConfig:
    """The model's configuration as fairseq-hydra-train completes it."""
    cfg = OmegaConf.structured(FairseqConfig())
    with open_dict(cfg):
        cfg.model, cfg.task = model, {"_name": task, "data": "data"}
        add_defaults(cfg)
    return cfg.model


def plain(cfg: DictConfig) -> Dict[str, Any]:
    return OmegaConf.to_container(cfg, resolve=True, enum_to_str=True)
