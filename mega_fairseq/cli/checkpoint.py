"""Reads a checkpoint of ours, and executes nothing that stands in it."""

import argparse
import math
import os
import re
from typing import Any, Dict, NamedTuple, Optional

from torch import Tensor

from mega_fairseq.cli import untrusted
from mega_fairseq.cli.refusal import Refusal

WRITER = "fairseq-train or mega-fairseq convert"


class Checkpoint(NamedTuple):
    """What we take from a checkpoint. Where the file has nothing of the kind, an option or a number is None."""

    cfg: Dict[str, Dict[str, Any]]  # options by section: model, task, criterion, ...
    tensors: Dict[str, Tensor]
    updates: int
    training: Dict[str, Any]  # how far it had come: fairseq's extra_state

    def option(self, section: str, name: str) -> Any:
        return self.cfg.get(section, {}).get(name)

    def word(self, section: str, name: str = "_name") -> Optional[str]:
        """An option that is a word; the one called `_name` is what its section is registered as."""
        return _word(self.option(section, name))

    def number(self, *names: str) -> Optional[float]:
        """The finite number under these names in `training`."""
        found: Any = self.training
        for name in names:
            found = found.get(name) if isinstance(found, dict) else None
        return found if type(found) in (int, float) and math.isfinite(found) else None


def read(path: str) -> Checkpoint:
    """The checkpoint at `path`, which may come from anybody; whose model it is of is for the caller to ask."""
    if not os.path.isfile(path):
        raise Refusal(f"there is no file {path}; give a checkpoint that {WRITER} wrote")
    try:
        content = untrusted.load(path, WRITER)
        tensors = untrusted.tensors_of(content, WRITER)
        return Checkpoint(_sections(content), tensors, _updates(content), _dict(content.get("extra_state")))
    except Refusal as refusal:
        raise Refusal(f"{path} {refusal}") from None


def _sections(content: Dict[str, Any]) -> Dict[str, Dict[str, Any]]:
    """fairseq since 0.10 keeps its options under `cfg`; before, and in the release, they were under `args`."""
    if isinstance(content.get("cfg"), dict):
        return {name: _dict(options) for name, options in content["cfg"].items()}
    arch = _word(_dict(content.get("args")).get("arch"))
    if arch is not None and arch.startswith("mega"):
        raise Refusal(
            f"is a checkpoint of the released code ({arch}); convert it first: mega-fairseq convert IN.pt OUT.pt"
        )
    raise Refusal(f"holds no options that fairseq 0.12 would read (model {arch}); give one that {WRITER} wrote")


def _updates(content: Dict[str, Any]) -> int:
    history = content.get("optimizer_history")
    updates = _dict(history[-1]).get("num_updates") if isinstance(history, list) and history else None
    if type(updates) is not int:
        raise Refusal(f"does not say how long it was trained, so it is damaged; give one that {WRITER} wrote")
    return updates


def _dict(found: Any) -> Dict[str, Any]:
    """Options without a dataclass come in a Namespace."""
    if isinstance(found, argparse.Namespace):
        return vars(found)
    return found if isinstance(found, dict) else {}


def _word(found: Any) -> Optional[str]:
    """Nothing that would do something to a terminal."""
    return found if isinstance(found, str) and re.fullmatch(r"[\w.-]{1,100}", found) else None
