"""Reads a checkpoint of the released code, and executes nothing that stands in it."""

import argparse
from typing import Any, Dict, Mapping, NamedTuple

import torch
from torch import Tensor

from mega_fairseq.cli import untrusted
from mega_fairseq.cli.refusal import Refusal
from mega_fairseq.models.checkpoints import takes_names

WRITER = "the released code"


class Released(NamedTuple):
    """What we take from a released checkpoint."""

    options: Dict[str, Any]
    tensors: Dict[str, Tensor]


def read(path: str) -> Released:
    """Options and tensors of the checkpoint at `path`, which may come from anybody."""
    if not takes_names():  # numpy has moved since the release wrote its checkpoints
        raise Refusal(
            f"torch {torch.__version__} cannot read it without executing it; convert where torch is 2.6 or newer, "
            "which fairseq allows from Python 3.11 on: what is written there loads here"
        )
    content = untrusted.load(path, WRITER)
    tensors = untrusted.tensors_of(content, WRITER)
    _check_origin(content)
    return Released(vars(content["args"]), tensors)


def _check_origin(content: Mapping[str, Any]) -> None:
    """Refuses what other code wrote: fairseq since 0.10 keeps its options under `cfg`, the release under `args`."""
    config = content.get("cfg")
    model = config.get("model") if isinstance(config, dict) else None
    name = model.get("_name") if isinstance(model, dict) else getattr(model, "_name", None)
    if isinstance(name, str) and name.startswith("mega_"):
        raise Refusal(f"is a checkpoint of this package already (model {name}); use it as it is")
    if config is not None or not isinstance(content.get("args"), argparse.Namespace):
        raise Refusal(f"was not written by the released code (model {name}); give one whose options are under `args`")
