"""Checks that a training resumes with the model of its checkpoint.

fairseq compares names and shapes of weights. Most options of a Mega model change neither, but change what it computes.
"""

import logging
import pickle
import re
from pathlib import Path
from typing import Any, Dict, List, Mapping

import torch
from fairseq.dataclass import FairseqDataclass
from fairseq.models import MODEL_REGISTRY, BaseFairseqModel
from torch import Tensor

from mega_fairseq.models.base import MegaModel
from mega_fairseq.models.checkpoints import plain_containers_allowed
from mega_fairseq.models.layers import count_layers
from mega_fairseq.models.options import typed
from mega_fairseq.models.overrides import FREE, LIMITS
from mega_fairseq.models.whole_config import option_of_command

logger = logging.getLogger(__name__)
# Options of tasks that change the data, and those that change the meaning of inputs.
DATA = {
    "mega_language_modeling": [
        *("documents", "tokens_per_sample", "variant_block_multiple_min", "variant_block_multiple_max", "valid_block"),
    ],
    "mega_classification": ["shorten_method", "init_token", "input_kind", "values_mean", "values_deviation"],
}
MEANING = {"init_token", "input_kind", "values_mean", "values_deviation"}


def check_same_model(
    model: MegaModel, cfg: FairseqDataclass, path: Path, resumed: bool, task_state: Mapping[str, Any]
) -> bool:
    """Compare the options of a training, and the state of its task, with those of the checkpoint that it starts from.

    A resumed training must have the same model. A new one that starts from the weights of another (`resumed` is false)
    gets a warning if its model computes a different function of them. Returns whether its classes differ from those of
    the checkpoint.
    """
    state = _read(path)
    theirs = (state.get("cfg") or {}).get("model")
    if not isinstance(theirs, dict) or MODEL_REGISTRY.get(theirs.get("_name")) is not type(model):
        return False  # not a Mega model, which fairseq reports
    kept = {f"{side}_layers" for side in model.STACKS if cfg[f"{side}_layers_to_keep"]}  # checked by their number
    compared = [name for name in cfg if name not in kept and not FREE.fullmatch(name)]
    changed = _changed(cfg, "model", theirs, compared)
    changes = _listed(cfg, "model", theirs, changed)
    task = (state["cfg"].get("task") or {}) if resumed else {}
    same_task = task.get("_name") == option_of_command(cfg, "task._name")
    changed_data = _changed(cfg, "task", task, DATA.get(task.get("_name"), []) if same_task else [])
    changes = ", ".join(filter(None, [changes, _listed(cfg, "task", task, changed_data)]))
    if resumed and (set(changed) - LIMITS or MEANING & set(changed_data)):
        raise ValueError(
            f"{path} belongs to another model: {changes}; give the values of the checkpoint to resume its training, or "
            "another --save-dir, with --finetune-from-model to start from its weights"
        )
    stored = state.get("task_state") or {}
    for name in stored.keys() & task_state.keys():
        if resumed and stored[name] != task_state[name]:
            raise ValueError(
                f"{path} was trained with other {name}, or in another order; give the data of its training, or another "
                "--save-dir, with --finetune-from-model to start from its weights"
            )
    if changed and not _fits(model, cfg, state["model"]):
        raise ValueError(f"the weights of {path} do not fit: {changes}; give the values of the checkpoint")
    if changes:
        start = "resuming from" if resumed else "starting a new training from"
        logger.warning(f"{start} {path} with other options: {changes}")
    if resumed:
        _warn_of_processes(cfg, path, state)
    return stored.get("classes") not in (None, task_state.get("classes"))


def _warn_of_processes(cfg: FairseqDataclass, path: Path, state: Mapping[str, Any]) -> None:
    """fairseq continues an epoch at the same batch of each process, whatever their number."""
    begun = ((state.get("extra_state") or {}).get("train_iterator") or {}).get("iterations_in_epoch")
    if not begun or option_of_command(cfg, "checkpoint.reset_dataloader"):
        return
    changes = []
    for section, name in (("distributed_training", "distributed_world_size"), ("task", "sequence_parallel_size")):
        theirs = state["cfg"].get(section) or {}
        changes += filter(None, [_listed(cfg, section, theirs, _changed(cfg, section, theirs, [name]))])
    if changes:
        logger.warning(
            f"resuming from {path} within an epoch, and {', '.join(changes)}: some examples of this epoch may be left "
            "out or read twice; to avoid that, give the same number, or resume from the end of an epoch"
        )


def _read(path: Path) -> Dict[str, Any]:
    try:
        with plain_containers_allowed():
            return torch.load(str(path), map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, pickle.UnpicklingError):
        return {}  # fairseq loads it next and reports the error


def _changed(cfg: FairseqDataclass, section: str, theirs: Dict[str, Any], names: List[str]) -> List[str]:
    """Return the options that both have, with different values."""
    ours = {name: option_of_command(cfg, f"{section}.{name}") for name in names if name in theirs and name != "_name"}
    return [name for name, value in ours.items() if str(value) != str(theirs[name])]


def _listed(cfg: FairseqDataclass, section: str, theirs: Dict[str, Any], names: List[str]) -> str:
    def text(value: Any) -> str:
        if isinstance(value, bool):
            return "on" if value else "off"
        return "not given" if value is None else str(value)

    ours = {name: option_of_command(cfg, f"{section}.{name}") for name in names}
    return ", ".join(f"{typed(name)} is {text(ours[name])} and was {text(theirs[name])}" for name in names)


def _fits(model: MegaModel, cfg: FairseqDataclass, weights: Dict[str, Tensor]) -> bool:
    """Whether the weights have the shapes of the model, without adapting them to other chunks as in evaluation."""
    weights = dict(weights)
    BaseFairseqModel.upgrade_state_dict_named(model, weights, "")  # names of older versions
    for side in model.STACKS:
        own, stored = len(getattr(model, side).layers), count_layers(weights, side)
        if stored != own and not (stored > own and cfg[f"{side}_layers_to_keep"]):
            return False
    return _shapes(model.state_dict()) == _shapes(weights)  # heads of classifiers are built later


def _shapes(weights: Dict[str, Tensor]) -> Dict[str, torch.Size]:
    """The shapes by name, one for all layers of a stack."""
    of_stacks = {name: tensor for name, tensor in weights.items() if not name.startswith("classification_heads.")}
    return {re.sub(r"\.layers\.\d+\.", ".layers.", name): tensor.shape for name, tensor in of_stacks.items()}
