"""Options in `--model-overrides` of fairseq's evaluation commands, and in `from_pretrained`."""

import ast
import difflib
import re
from typing import Iterable

from fairseq.dataclass import FairseqDataclass
from fairseq.tasks import FairseqTask

from mega_fairseq.models.whole_config import SECTIONS, option_of_command

# Options of models that may change freely, from one training to the next too: weights keep their meaning.
FREE = re.compile(
    r"\w*(drop|dropout|_embed_path|_activations|_layers_to_keep)|init|piece_tokens|generation_weights|_name"
)
LIMITS = {"max_source_positions", "max_target_positions", "max_positions"}  # may change if no weight has another shape
CHANGEABLE = re.compile(r"\w*(chunk_size|truncation_length)")  # may change after training


def check_overrides(cfg: FairseqDataclass, task: FairseqTask) -> None:
    """Apply overrides of options that are newer than the checkpoint, and raise an error for those of `check_names`.

    fairseq ignores overrides of options that the checkpoint does not have. The task has the command line, and `cfg`
    the options of the checkpoint, with defaults for newer ones.
    """
    given = option_of_command(getattr(task, "cfg", None), "common_eval.model_overrides")
    try:
        overrides = ast.literal_eval(given or "{}")
    except (SyntaxError, ValueError):  # fairseq-eval-lm and fairseq-validate evaluate any expression
        return
    newer = {name for name in overrides if hasattr(cfg, name) and not _is_of_checkpoint(name, cfg)}
    for name in newer:
        setattr(cfg, name, overrides[name])
    check_names("--model-overrides has", overrides, cfg)


def check_names(where: str, names: Iterable[str], cfg: FairseqDataclass) -> None:
    """Raise an error that begins with `where` if one of these options is unknown, or would make the weights wrong."""
    for name in names:
        if hasattr(cfg, name):
            if not (name in LIMITS or FREE.fullmatch(name) or CHANGEABLE.fullmatch(name)):
                raise ValueError(f"{where} {name!r}, which must be as in the training of the weights; leave it out")
            continue
        if _is_of_checkpoint(name, cfg):
            continue
        similar = difflib.get_close_matches(str(name), list(cfg), n=1)
        remedy = f"did you mean {similar[0]!r}?" if similar else "leave it out"
        raise ValueError(f"{where} {name!r}, an unknown option for this checkpoint; {remedy}")


def _is_of_checkpoint(name: str, cfg: FairseqDataclass) -> bool:
    return name in SECTIONS or any(_has(cfg, f"{section}.{name}") for section in SECTIONS)


def _has(cfg: FairseqDataclass, name: str) -> bool:
    missing = object()
    return option_of_command(cfg, name, missing) is not missing
