"""Checkpoints of the released code."""

import argparse
from typing import Any, Dict, Mapping, NamedTuple

import torch
from torch import Tensor

from mega_fairseq.cli import UserError
from mega_fairseq.cli.checkpoint import untrusted
from mega_fairseq.models.checkpoints import takes_names

WRITER = "the released code"


class Released(NamedTuple):
    """What is converted; the state of the optimizer is not."""

    options: Dict[str, Any]
    tensors: Dict[str, Tensor]


def read(path: str) -> Released:
    """Read options and tensors of the released checkpoint at `path`."""
    if not takes_names():  # numpy has renamed modules since the released checkpoints were written
        raise UserError(
            f"torch {torch.__version__} cannot read it without executing code in it; convert it with torch 2.6 or "
            "newer (Python 3.11 or newer): the converted checkpoint loads here"
        )
    content = untrusted.load(path, WRITER)
    tensors = untrusted.model_tensors(content, WRITER)
    _check_writer(content)
    return Released(vars(content["args"]), tensors)


def _check_writer(content: Mapping[str, Any]) -> None:
    """fairseq stores its options under `cfg` since 0.10, the released code under `args`."""
    config = content.get("cfg")
    model = config.get("model") if isinstance(config, dict) else None
    name = model.get("_name") if isinstance(model, dict) else getattr(model, "_name", None)
    if isinstance(name, str) and name.startswith("mega_"):
        raise UserError(f"is already a checkpoint of this plugin (model {name}); use it as it is")
    if config is not None or not isinstance(content.get("args"), argparse.Namespace):
        raise UserError(f"was not written by the released code (model {name}); give one with options under `args`")
