"""Convert a released checkpoint to the checkpoint that fairseq-train would have written for the same model."""

from collections import Counter
from typing import Any, Dict, List, Mapping, NamedTuple, Sequence

import torch
from fairseq.criterions import CRITERION_DATACLASS_REGISTRY
from fairseq.data import Dictionary
from fairseq.dataclass.configs import FairseqConfig
from fairseq.models import MODEL_DATACLASS_REGISTRY
from fairseq.tasks import TASK_DATACLASS_REGISTRY, TASK_REGISTRY
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn

import mega_fairseq.criterions
import mega_fairseq.models
import mega_fairseq.tasks  # noqa: F401 - registers them
from mega_fairseq.cli import UserError
from mega_fairseq.cli.checkpoint.build import check_layers, dictionary, invalid_options, without_memory
from mega_fairseq.cli.convert.families import LANGUAGE, PATH, TRANSLATION, Family, choose, family_of
from mega_fairseq.cli.convert.names import translate
from mega_fairseq.cli.convert.released import Released
from mega_fairseq.models.embedding import types_of

# Tied tensors that the release stores twice: copy -> original.
COPIES = {"decoder.output_projection.weight": "decoder.embed_tokens.weight"}


class Converted(NamedTuple):
    state: Dict[str, Any]  # plain values and tensors, which torch.load reads with weights_only=True
    summary: List[str]


def convert(released: Released) -> Converted:
    family = family_of(released.options)
    cfg = configuration(released.options, family)
    tensors = _translated(released.tensors)
    model = _empty_model(cfg, [_dictionary(tensors, name) for name in family.embeddings], len(tensors))
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    _drop_copies(tensors, shapes)
    _tie(tensors, model)
    tensors.update({name: torch.zeros(shape) for name, shape in shapes.items() if name.endswith("._float_tensor")})
    _check(tensors, shapes)
    state = {
        "args": None,  # options of fairseq before 0.10
        "cfg": OmegaConf.to_container(cfg, resolve=True, enum_to_str=True),
        "model": tensors,
        "criterion": None,
        "optimizer_history": [
            {"criterion_name": "", "optimizer_name": "", "lr_scheduler_state": {}, "num_updates": 0},
        ],
        "task_state": {},
        "extra_state": {
            "train_iterator": {"version": 2, "epoch": 1, "iterations_in_epoch": 0, "shuffle": True},
            "val_loss": None,
        },
        "last_optimizer_state": None,
    }
    return Converted(state, _summary(released, family, cfg, model))


def configuration(options: Mapping[str, Any], family: Family) -> DictConfig:
    """fairseq's complete configuration, with the checkpoint's options of model and task."""
    model, task = choose(options, family.model_options), choose(options, family.task_options)
    model.update({name: None for name, kind in family.model_options.items() if kind is PATH})  # tensors replace files
    family.settle(model, task)
    cfg = OmegaConf.structured(FairseqConfig)
    cfg.task = TASK_DATACLASS_REGISTRY[family.task](**task)
    cfg.task._name = family.task
    try:
        cfg.model = MODEL_DATACLASS_REGISTRY[family.model](**model)
    except ValueError as error:
        raise invalid_options(error) from None
    cfg.model._name = family.model
    cfg.criterion = _criterion(options, family)
    return cfg


def _criterion(options: Mapping[str, Any], family: Family) -> Any:
    """The criterion for fairseq-validate."""
    if family is LANGUAGE:
        name, chosen = "mega_lm_cross_entropy", {}
    elif options["adaptive_softmax_cutoff"] is not None:
        name, chosen = "adaptive_loss", {}
    elif options.get("criterion") == "label_smoothed_cross_entropy":
        name, chosen = "label_smoothed_cross_entropy", choose(options, {"label_smoothing": float})
    else:
        name, chosen = "cross_entropy", {}
    return CRITERION_DATACLASS_REGISTRY[name](_name=name, **chosen)


def _translated(released: Mapping[str, Tensor]) -> Dict[str, Tensor]:
    try:
        return translate(released)
    except KeyError as missing:
        raise UserError(f"lacks the tensor {missing}, so it is damaged; get it again from its source") from None
    except (IndexError, RuntimeError):  # a tensor too small to be split
        raise UserError("contains tensors of shapes that do not fit together; get it again from its source") from None


def _empty_model(cfg: DictConfig, dictionaries: Sequence[Dictionary], tensors: int) -> nn.Module:
    """The model that fairseq will build from these options, on the meta device."""
    check_layers(max(cfg.model[name] for name in ("encoder_layers", "decoder_layers") if name in cfg.model), tensors)
    with without_memory():
        return TASK_REGISTRY[cfg.task._name](cfg.task, *dictionaries).build_model(cfg.model)


def _dictionary(tensors: Mapping[str, Tensor], embedding: str) -> Dictionary:
    types = types_of(tensors, embedding)
    if not types:
        raise UserError(f"lacks the tensor {embedding}.weight, so it is damaged; get it again from its source")
    return dictionary(types)


def _drop_copies(tensors: Dict[str, Tensor], shapes: Mapping[str, Sequence[int]]) -> None:
    for copy, original in COPIES.items():
        if copy in tensors and copy not in shapes and original in tensors and _same(tensors[copy], tensors[original]):
            del tensors[copy]


def _tie(tensors: Dict[str, Tensor], model: nn.Module) -> None:
    """Store one tensor under all the names that the model has for it, so that it is saved once."""
    names: Dict[int, List[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for tied in names.values():
        held = [name for name in tied if name in tensors]
        for name in held[1:]:
            if not _same(tensors[name], tensors[held[0]]):
                raise UserError(
                    f"contains different tensors {name!r} and {held[0]!r}, which its options tie, so it is damaged; "
                    "get it again from its source"
                )
        if held:
            tensors.update(dict.fromkeys(tied, tensors[held[0]]))


def _same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def _check(tensors: Mapping[str, Tensor], shapes: Mapping[str, Sequence[int]]) -> None:
    """The checkpoint must contain the model's tensors and no others."""
    wrong = {
        "lacks {} tensors of its model": set(shapes) - set(tensors),
        "contains {} tensors that its model lacks": set(tensors) - set(shapes),
        "contains {} tensors of other shapes than its model's": {
            name for name in set(shapes) & set(tensors) if tensors[name].shape != shapes[name]
        },
    }
    for problem, names in wrong.items():
        if names:
            raise UserError(
                f"{problem.format(len(names))}, the first is {min(names)!r}, so its options are of another model "
                "or it is damaged; get it again from its source"
            )


def _summary(released: Released, family: Family, cfg: DictConfig, model: nn.Module) -> List[str]:
    parameters = sum(p.numel() for p in model.parameters())
    ((dtype, _),) = Counter(str(t.dtype).split(".")[-1] for t in released.tensors.values()).most_common(1)
    what = f"{cfg.task.source_lang} to {cfg.task.target_lang}" if family is TRANSLATION else "language model"
    lines = [f"{released.options['arch']}, {what}, {parameters:,} parameters, stored as {dtype}"]
    taps = released.options["truncation_length"]
    if taps:
        ema, option = ("the EMA", "--truncation-length 0")
        if family is TRANSLATION:
            ema, option = ("the decoder's EMA", f"--truncation-length {taps} --decoder-truncation-length 0")
        lines.append(f"{ema} keeps all its taps ({option}): the release used {taps} in training, but all in evaluation")
    lines.append(
        "the optimizer's state and counters are dropped, since they belong to the released tensors: continue training "
        "with --finetune-from-model or --restore-file and these model options"
    )
    paths = [name for name, kind in family.model_options.items() if kind is PATH and released.options[name]]
    if paths:
        lines.append(f"{' and '.join(paths)} dropped: the embeddings are in the checkpoint")
    return lines
