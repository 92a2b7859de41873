"""Convert options and tensors of a released checkpoint to what fairseq-train would have saved for the same model.

Both come from an untrusted file. OmegaConf checks the types of the options, and the tensors must fill the model.
"""

import reprlib
from collections import Counter
from dataclasses import fields
from typing import Any, Dict, Iterable, List, Mapping, NamedTuple, Tuple

import torch
from fairseq.criterions import CRITERION_DATACLASS_REGISTRY
from fairseq.dataclass.configs import FairseqConfig
from fairseq.models import MODEL_DATACLASS_REGISTRY
from fairseq.tasks import TASK_DATACLASS_REGISTRY
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn

import mega_fairseq.criterions
import mega_fairseq.models
import mega_fairseq.tasks  # noqa: F401 - registers them
from mega_fairseq.cli import UserError
from mega_fairseq.cli.checkpoint.build import PATHS, empty_model, fill, invalid_options
from mega_fairseq.cli.checkpoint.trained import Checkpoint
from mega_fairseq.cli.convert.names import translate
from mega_fairseq.models.options import mixer_options
from mega_fairseq.modules import GatedAttentionConfig

Options = Mapping[str, Any]

SIDES = ("encoder", "decoder")
RELEASED = {option.partition("}_")[2] for option in GatedAttentionConfig.options().values()} - {"token_shift"}
# Model options that the release does not have. All others must be in the checkpoint: a default may change its function.
NEW = {
    *("_name", "init", "checkpoint_activations", "offload_activations", "piece_tokens", "adaptive_softmax_factor"),
    *("token_mixer", "ffn_activation_fn"),
    *(f"{side}_{name}" for side in SIDES for name in ("truncation_length", "layerdrop", "layers_to_keep")),
    *(f"{side}_{name}" for side in SIDES for name in ("token_mixer", *(mixer_options().keys() - RELEASED))),
}


class Family(NamedTuple):
    """Released architectures that convert to the same model."""

    archs: Tuple[str, ...]
    model: str  # registered name
    task: str
    task_options: Tuple[str, ...]


TRANSLATION = Family(
    archs=("mega", "mega_wmt_en_de", "mega_wmt_en_de_big"),
    model="mega_transformer",
    task="translation",
    task_options=(
        *("data", "source_lang", "target_lang", "left_pad_source", "left_pad_target"),
        *("max_source_positions", "max_target_positions"),
    ),
)
LANGUAGE = Family(
    archs=(
        *("mega_lm", "mega_lm_big", "mega_lm_adaptive_base", "mega_lm_adaptive_big", "mega_lm_wiki103"),
        *("mega_lm_enwik8_base", "mega_lm_enwik8_large"),
    ),
    model="mega_lm",
    task="mega_language_modeling",
    task_options=(
        *("data", "tokens_per_sample", "variant_block_multiple_min", "variant_block_multiple_max", "valid_block"),
    ),
)


def convert(options: Options, tensors: Mapping[str, Tensor]) -> Tuple[Dict[str, Any], List[str]]:
    """The converted checkpoint, which torch.load reads with weights_only=True, and a summary for the user."""
    family = family_of(options)
    names = (field.name for field in fields(MODEL_DATACLASS_REGISTRY[family.model]))
    missing = [name for name in names if name not in options and name not in NEW]
    if missing:
        raise UserError(f"lacks the option {missing[0]}, so it is damaged; get it again from its source")
    cfg = configuration(options, family)
    dtypes = Counter(str(tensor.dtype).split(".")[-1] for tensor in tensors.values())
    try:
        tensors = translate(tensors)
    except (LookupError, RuntimeError) as error:
        raise UserError(f"contains tensors that do not fit together ({error}); get it again from its source") from None
    plain = OmegaConf.to_container(cfg, resolve=True, enum_to_str=True)
    model = empty_model(Checkpoint(plain, tensors, updates=0, progress={}, optimizer={}))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    _tie(tensors, model)
    fill(model, tensors)
    state = {
        "args": None,  # options of fairseq before 0.10
        "cfg": plain,
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
    what = f"{cfg.task.source_lang} to {cfg.task.target_lang}" if family is TRANSLATION else "language model"
    stored = f"stored as {dtypes.most_common(1)[0][0]}"
    return state, [f"{options['arch']}, {what}, {parameters:,} parameters, {stored}", *_changes(options, family)]


# ------------------------------------------------------------------------------------------- options


def family_of(options: Options) -> Family:
    for family in (TRANSLATION, LANGUAGE):
        if options.get("arch") in family.archs:
            return family
    known = ", ".join(TRANSLATION.archs + LANGUAGE.archs)
    raise UserError(
        f"has the architecture {reprlib.repr(options.get('arch'))}, which cannot be converted; give one of {known}"
    )


def configuration(options: Options, family: Family) -> DictConfig:
    """fairseq's complete configuration, with the checkpoint's options of model and task."""
    config, task = MODEL_DATACLASS_REGISTRY[family.model], TASK_DATACLASS_REGISTRY[family.task]
    chosen = _choose(options, (field.name for field in fields(config)))
    chosen.update({name: None for name in PATHS if name in chosen})  # the tensors replace files
    if chosen.get("max_target_positions", 0) is None:
        chosen["max_target_positions"] = options.get("tokens_per_sample")
    cfg = OmegaConf.structured(FairseqConfig)
    try:
        cfg.model, cfg.task = config(**chosen), task(**_choose(options, family.task_options))
        cfg.criterion = _criterion(options, family)
    except ValueError as error:
        raise invalid_options(error) from None
    cfg.model._name, cfg.task._name = family.model, family.task
    _settle(cfg.model, cfg.task)
    return cfg


def _settle(model: DictConfig, task: DictConfig) -> None:
    """Adapt the options where the release differs."""
    if model._name == TRANSLATION.model:
        if model.truncation_length:
            model.decoder_truncation_length = 0  # the release ignores it in generation
        return
    model.truncation_length = 0  # the release ignores it in evaluation
    if model.decoder_chunk_size != -1:
        task.tokens_per_sample = 0  # segments are multiples of the chunk
    # The release accepts these also if there is nothing to tie.
    model.share_decoder_input_output_embed &= model.adaptive_softmax_cutoff is None
    model.tie_adaptive_proj &= model.tie_adaptive_weights


def _choose(options: Options, names: Iterable[str]) -> Dict[str, Any]:
    chosen = {name: options[name] for name in names if name in options}
    for name, value in chosen.items():
        if isinstance(value, str) and ("${" in value or not value.isprintable()):  # ${NAME} would be looked up
            raise UserError(f"has {reprlib.repr(value)} for the option {name}; get it again from its source")
    return chosen


def _criterion(options: Options, family: Family) -> Any:
    """The criterion for fairseq-validate."""
    name = "mega_lm_cross_entropy" if family is LANGUAGE else options.get("criterion")
    if name == "label_smoothed_cross_entropy":
        return CRITERION_DATACLASS_REGISTRY[name](_name=name, **_choose(options, ["label_smoothing"]))
    name = name if name in ("mega_lm_cross_entropy", "adaptive_loss") else "cross_entropy"
    return CRITERION_DATACLASS_REGISTRY[name](_name=name)


# ------------------------------------------------------------------------------------------- tensors


def _tie(tensors: Dict[str, Tensor], model: nn.Module) -> None:
    """Store one tensor under all the names that the model has for it, so that it is saved once."""
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    tensors.update({name: torch.zeros(shape) for name, shape in shapes.items() if name.endswith("._float_tensor")})
    copy, original = "decoder.output_projection.weight", "decoder.embed_tokens.weight"
    if copy in tensors and copy not in shapes and original in tensors and _same(tensors[copy], tensors[original]):
        del tensors[copy]
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


# ------------------------------------------------------------------------------------------- summary


def _changes(options: Options, family: Family) -> List[str]:
    """Where the converted model differs from the released one."""
    lines, taps = [], options.get("truncation_length")
    if taps:
        ema, option = ("the EMA", "--truncation-length 0")
        if family is TRANSLATION:
            ema, option = ("the decoder's EMA", f"--truncation-length {taps} --decoder-truncation-length 0")
        lines.append(f"{ema} keeps all its taps ({option}): the release used {taps} in training, but all in evaluation")
    lines.append(
        "the optimizer's state and counters are dropped, since they belong to the released tensors: continue training "
        "with --finetune-from-model or --restore-file and these model options"
    )
    return lines
