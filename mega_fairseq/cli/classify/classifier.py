"""The classifier in a checkpoint, from a file that is not trusted."""

from dataclasses import fields
from typing import Any, List, Mapping, Optional

import torch
from fairseq.models import MODEL_REGISTRY
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mega_fairseq.cli import UserError
from mega_fairseq.cli.checkpoint import trained
from mega_fairseq.cli.checkpoint.build import empty_model, fill
from mega_fairseq.data.classification.inputs import Scaling
from mega_fairseq.models import MegaClassifier
from mega_fairseq.tasks import MegaClassificationConfig, MegaClassificationTask
from mega_fairseq.tasks.prediction import Classifier

TASKS = ("mega_classification", "sentence_prediction")


def load(path: str, data: Optional[str], cpu: bool) -> Classifier:
    """The model with its task, on a GPU if there is one; `data` is None for inputs that are not in a folder."""
    checkpoint = trained.read(path)
    if not issubclass(MODEL_REGISTRY.get(checkpoint.word("model"), object), MegaClassifier):
        raise UserError(f"contains the model {checkpoint.word('model')}; give a mega_classifier")
    if checkpoint.word("task") not in TASKS:
        raise UserError(f"was trained with --task {checkpoint.word('task')}; give one of {' or '.join(TASKS)}")
    model = fill(empty_model(checkpoint), checkpoint.tensors).float().eval()
    task = _task(checkpoint, data)
    _check(task, model)
    classifier = Classifier(task, [model])
    return classifier if cpu or not torch.cuda.is_available() else classifier.cuda()


def _task(checkpoint: trained.Checkpoint, data: Optional[str]) -> MegaClassificationTask:
    given = checkpoint.cfg["task"]
    options = {field.name: given[field.name] for field in fields(MegaClassificationConfig) if field.name in given}
    if data is not None:
        options["data"] = data
    try:
        cfg = OmegaConf.merge(MegaClassificationConfig(), {**options, "seed": 1})  # checks their types
        task = MegaClassificationTask.setup_task(cfg, from_checkpoint=data is None)
        task.load_state_dict(_state(checkpoint.task_state))
    except OmegaConfBaseException as error:
        raise UserError(
            f"has invalid task options ({str(error).splitlines()[0]}); get it again from its source"
        ) from None
    except (FileNotFoundError, ValueError) as error:
        raise UserError(f"cannot classify: {error}") from None
    return task


def _state(stored: Mapping[str, Any]) -> Mapping[str, Any]:
    """The names of classes and tokens, and the type of values, if they are that."""

    def words(found: Any) -> Optional[List[str]]:
        return found if isinstance(found, list) and all(isinstance(word, str) for word in found) else None

    if not "".join(words(stored.get("classes")) or []).isprintable():
        raise UserError("has names of classes with characters that are not printable; get the file again")

    number_type = stored.get("number_type")
    known = number_type if number_type in Scaling.NUMBER_TYPES else None
    return {**{name: words(stored.get(name)) for name in ("classes", "symbols")}, "number_type": known}


def _check(task: MegaClassificationTask, model: MegaClassifier) -> None:
    heads = list(model.classification_heads.values())
    if len(heads) != 1:
        raise UserError(f"has {len(heads)} classification heads; give a checkpoint with one")
    types = None if model.encoder.dictionary is None else len(model.encoder.dictionary)
    ours = None if task.dictionary is None else len(task.dictionary)
    classes = heads[0].out.out_features
    if types != ours:
        known = "no dictionary" if ours is None else f"a dictionary of {ours:,} types"
        needed = "takes values" if types is None else f"has {types:,} types"
        raise UserError(f"{needed}, and there is {known}; give the folder of its training as DATA")
    try:
        task.check_first_token()
    except ValueError as error:
        raise UserError(f"cannot classify: {error}") from None
    if classes != len(task.classes):
        raise UserError(
            f"has {classes} classes and the labels of the data {len(task.classes)}; give the folder of its training "
            "as DATA"
        )
