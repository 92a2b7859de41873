"""Checkpoints of fairseq-train and of `mega-fairseq convert`."""

import argparse
import re
from typing import Any, Dict, NamedTuple, Optional

from torch import Tensor

from mega_fairseq.cli import UserError
from mega_fairseq.cli.checkpoint import untrusted

WRITER = "fairseq-train or mega-fairseq convert"


class Checkpoint(NamedTuple):
    """The parts of a checkpoint that the commands use."""

    cfg: Dict[str, Dict[str, Any]]  # options by section: model, task, criterion, ...
    tensors: Dict[str, Tensor]
    updates: int = 0
    task_state: Dict[str, Any] = {}

    def word(self, section: str, name: str = "_name") -> Optional[str]:
        """An option that is a word, or None; `_name` is the registered name of the section's class."""
        return _word(self.cfg.get(section, {}).get(name))

    def check_task(self, *tasks: str) -> None:
        """Raises an error unless it was trained with one of these: others may add tokens to what a model reads."""
        if self.word("task") not in tasks:
            raise UserError(f"was trained with --task {self.word('task')}; give one of --task {' or '.join(tasks)}")


def read(path: str) -> Checkpoint:
    """Read a checkpoint of any model."""
    content = untrusted.load(path, WRITER)
    tensors = untrusted.model_tensors(content, WRITER)
    return Checkpoint(_sections(content), tensors, _updates(content), _dict(content.get("task_state")))


def _sections(content: Dict[str, Any]) -> Dict[str, Dict[str, Any]]:
    """fairseq stores its options under `cfg` since 0.10; older versions and the released code under `args`."""
    if isinstance(content.get("cfg"), dict):
        return {name: _dict(options) for name, options in content["cfg"].items()}
    arch = _word(_dict(content.get("args")).get("arch"))
    if arch is not None and arch.startswith("mega"):
        raise UserError(
            f"is a checkpoint of the released code ({arch}); convert it first: mega-fairseq convert IN.pt OUT.pt"
        )
    raise UserError(f"contains no options that fairseq 0.12 can read (model {arch}); give one that {WRITER} wrote")


def _updates(content: Dict[str, Any]) -> int:
    """The number of updates, or 0 if it is unknown."""
    history = content.get("optimizer_history")
    updates = _dict(history[-1]).get("num_updates") if isinstance(history, list) and history else None
    return updates if type(updates) is int else 0


def _dict(value: Any) -> Dict[str, Any]:
    """Options without a dataclass are stored in a Namespace."""
    if isinstance(value, argparse.Namespace):
        return vars(value)
    return value if isinstance(value, dict) else {}


def _word(value: Any) -> Optional[str]:
    """A string without control characters, which could change the user's terminal."""
    return value if isinstance(value, str) and re.fullmatch(r"[\w.-]{1,100}", value) else None
