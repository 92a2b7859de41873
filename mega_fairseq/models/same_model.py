"""Checks that a training starts from a complete checkpoint of the same model, and that overrides fit the weights.

fairseq compares only names and shapes of weights, but most options of a Mega model change neither and still change what
it computes. A run that is killed while fairseq copies a checkpoint to checkpoint_last.pt leaves a truncated file there.

With a stock task such as `translation`, building the model is the only call into the plugin before fairseq loads a
checkpoint, so this is checked there.
"""

import ast
import difflib
import logging
import os
import pickle
from argparse import Namespace
from pathlib import Path
from typing import Any, Dict, Iterable, Mapping, Optional, Tuple, Type

import torch
from fairseq.data.data_utils import infer_language_pair
from fairseq.dataclass import FairseqDataclass
from fairseq.file_io import PathManager
from fairseq.models import MODEL_REGISTRY, BaseFairseqModel
from fairseq.tasks import FairseqTask
from omegaconf import DictConfig
from torch import Tensor

from mega_fairseq.fairseq_options import (
    ALWAYS,
    SAME_SHAPES,
    SECTIONS,
    changes,
    is_training,
    option_of_command,
    typed,
)

logger = logging.getLogger(__name__)
LANGUAGES = ("source_lang", "target_lang")
TASK = ("init_token", "input_kind", "values_mean", "values_deviation", *LANGUAGES)  # options that weights depend on
LAST = "checkpoint_last.pt"  # the default of --restore-file


def check_start(model: BaseFairseqModel, cfg: FairseqDataclass, task: FairseqTask) -> None:
    """Checks the checkpoint that a training will load."""
    if not is_training(cfg):
        return
    options = option_of_command(cfg, "checkpoint")
    path, resumes = _start(options)
    if options.checkpoint_suffix:  # each process loads a part
        return
    _check_given(options)
    if not path or not Path(path).is_file():
        path = None
    _warn_of_unread(path, options)
    _warn_of_replaced(path, options)
    if path is None:
        return
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError:  # fairseq may load classes that are not plain containers
        return
    except (RuntimeError, OSError, EOFError):
        option = "--finetune-from-model" if path == options.finetune_from_model else "--restore-file"
        raise ValueError(
            f"{path} is not a complete checkpoint; give the path of another one as {option}, or remove it to train "
            "from the start"
        ) from None
    _compare(model, cfg, state, path, resumes, task.state_dict())


def _check_given(options: DictConfig) -> None:
    """Raises an error if --restore-file is missing: fairseq would train from the start, over other checkpoints."""
    given = options.restore_file
    if given != LAST and not PathManager.isfile(given) and not _is_last(given, options):
        there = Path(options.save_dir, given)
        raise ValueError(f"--restore-file {given} is no file; give {there if there.is_file() else 'its path'}")


def _is_last(path: Optional[str], options: DictConfig) -> bool:
    """Whether a training that starts from `path` goes on in its --save-dir."""
    return path is not None and Path(path).resolve() == Path(options.save_dir, LAST).resolve()


def _warn_of_unread(path: Optional[str], options: DictConfig) -> None:
    """Warns if the training goes on in --save-dir though --finetune-from-model may mean another start."""
    if not options.finetune_from_model or not _is_last(path, options):
        return
    given, last = Path(options.finetune_from_model), Path(path)
    same_folder = given.resolve().parent == last.resolve().parent
    if given.is_file() and (same_folder or given.stat().st_mtime > last.stat().st_mtime):
        logger.warning(f"this training goes on from {path} and not from {given}; give another --save-dir to start anew")


def _warn_of_replaced(path: Optional[str], options: DictConfig) -> None:
    """Warns of the checkpoints of --save-dir if the training does not go on from the last one, with its best score."""
    folder = Path(options.save_dir)
    forgets = options.reset_optimizer or options.reset_meters  # the best score, too
    goes_on = _is_last(path, options) and not forgets
    if not goes_on and not options.no_save and any(folder.glob("checkpoint*.pt")):
        start = f"from {path}" if path else "with new weights"
        logger.warning(
            f"{folder} has checkpoints, and this training starts {start}: it replaces those of the same names"
        )


def _start(options: DictConfig) -> Tuple[Optional[str], bool]:
    """The path of the checkpoint that fairseq will load, and whether that resumes its training."""
    resumes, last = not options.reset_optimizer, Path(options.save_dir, LAST)
    if options.restore_file != LAST:
        return options.restore_file, resumes
    if last.exists():
        return str(last), resumes
    if getattr(options, "continue_once", None):  # fairseq 0.12.2 has no such option
        return options.continue_once, resumes
    return options.finetune_from_model, False


def _compare(
    model: BaseFairseqModel, cfg: FairseqDataclass, state: Dict[str, Any], path: str, resumes: bool, task_state: Mapping
) -> None:
    """Raises an error if a resumed training has another model than its checkpoint, and warns if a new one has."""
    if MODEL_REGISTRY.get(_section(state, "model").get("_name")) is not type(model):
        return  # not a Mega model, which fairseq reports
    may_change = changes(model.OPTIONS)
    names_of_model = {name for name, change in may_change.items() if change != ALWAYS}
    data = option_of_command(cfg, "task.data")  # None if the task has no dataclass
    compared = {"model": names_of_model, "task": TASK if resumes and data else ()}
    changed = {}
    for section, names in compared.items():
        theirs = _section(state, section)
        theirs = {name: theirs[name] for name in set(names) & theirs.keys()}
        ours = {name: option_of_command(cfg, f"{section}.{name}") for name in theirs}  # building a model changes `cfg`
        for options in (ours, theirs) if LANGUAGES[0] in theirs else ():
            _find_languages(options, data)
        for name in theirs:
            if str(ours[name]) != str(theirs[name]):
                changed[name] = f"{typed(name)} is {ours[name]} and was {theirs[name]}"
    listed = ", ".join(sorted(changed.values()))
    other_model = any(may_change.get(name) != SAME_SHAPES for name in changed)
    if resumes and changed and (other_model or _reshaped(model, state.get("model") or {})):
        raise ValueError(
            f"{path} belongs to another model: {listed}; give the values of the checkpoint, or another --save-dir, "
            "with --finetune-from-model to start from its weights"
        )
    stored = state.get("task_state") or {}
    others = " and ".join(name for name in sorted(stored.keys() & task_state) if stored[name] != task_state[name])
    if resumes and others:
        raise ValueError(
            f"{path} was trained with other {others}, or in another order; give the data of its training, or another "
            "--save-dir"
        )
    start = f"{'resuming' if resumes else 'starting a new training'} from {path} with other"
    if others:
        logger.warning(f"{start} {others}, or in another order, than its weights were trained for")
    if changed:
        logger.warning(f"{start} options: {listed}")


def _find_languages(options: Dict[str, Any], data: str) -> None:
    """Without both options, fairseq finds the languages by the names of files."""
    if None in (options[name] for name in LANGUAGES):
        options.update(zip(LANGUAGES, infer_language_pair(data.split(os.pathsep)[0])))


def _reshaped(model: BaseFairseqModel, stored: Mapping[str, Tensor]) -> bool:
    """Whether a weight of the model has another shape than in the checkpoint."""
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    return any(shapes.get(name, tensor.shape) != tensor.shape for name, tensor in stored.items())


def _section(state: Dict[str, Any], name: str) -> Mapping[str, Any]:
    """A section of the config in a checkpoint; those of tasks and models without a dataclass are Namespaces."""
    section = (state.get("cfg") or {}).get(name) or {}
    return vars(section) if isinstance(section, Namespace) else section


# --------------------------------------------------------------------------------------- overrides


def check_overrides(cfg: FairseqDataclass, options: Type[FairseqDataclass], task: FairseqTask) -> None:
    """Applies --model-overrides of options that are newer than the checkpoint; raises an error for others.

    fairseq ignores overrides of options that the checkpoint does not have. The task has the command line, and `cfg`
    the options of the checkpoint, with defaults for newer ones.
    """
    text = option_of_command(getattr(task, "cfg", None), "common_eval.model_overrides")
    try:
        overrides = ast.literal_eval(text or "{}")
    except (SyntaxError, ValueError):  # fairseq-eval-lm and fairseq-validate evaluate any expression
        return
    for name in overrides:
        if hasattr(cfg, name) and not _is_of_checkpoint(name, cfg):
            setattr(cfg, name, overrides[name])
    check_names("--model-overrides has", overrides, cfg, options)


def check_names(where: str, names: Iterable[str], cfg: FairseqDataclass, options: Type[FairseqDataclass]) -> None:
    """Raises an error that begins with `where` if one of these options is unknown, or would make the weights wrong."""
    may_change = changes(options)
    for name in names:
        if hasattr(cfg, name):
            if name in may_change and may_change[name] is None:
                raise ValueError(f"{where} {name!r}, which must be as in the training of the weights; leave it out")
        elif not _is_of_checkpoint(name, cfg):
            similar = difflib.get_close_matches(str(name), list(cfg), n=1)
            remedy = f"did you mean {similar[0]!r}?" if similar else "leave it out"
            raise ValueError(f"{where} {name!r}, an unknown option for this checkpoint; {remedy}")


def _is_of_checkpoint(name: str, cfg: FairseqDataclass) -> bool:
    missing = object()
    sections = (f"{section}.{name}" for section in SECTIONS)
    return name in SECTIONS or any(option_of_command(cfg, each, missing) is not missing for each in sections)
