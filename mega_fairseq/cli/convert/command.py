"""`mega-fairseq convert`: convert a checkpoint of the released code, or a folder of Hugging Face's Mega, to what
fairseq-train would have saved; or write such a folder.

Options and tensors come from an untrusted file. OmegaConf checks the types of the options, and the tensors must fill
the model.
"""

import argparse
import contextlib
import io
import os
import reprlib
from collections import Counter
from dataclasses import fields
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import torch
from fairseq.criterions import CRITERION_DATACLASS_REGISTRY
from fairseq.data import Dictionary
from fairseq.dataclass.configs import FairseqConfig
from fairseq.models import MODEL_DATACLASS_REGISTRY
from fairseq.tasks import TASK_DATACLASS_REGISTRY
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn

import mega_fairseq.criterions
import mega_fairseq.models
import mega_fairseq.tasks  # noqa: F401 - registers them
from mega_fairseq.cli import UserError, errors_of
from mega_fairseq.cli.checkpoint import trained, untrusted
from mega_fairseq.cli.checkpoint.build import PATHS, empty_model, fill, invalid_options
from mega_fairseq.cli.checkpoint.trained import Checkpoint
from mega_fairseq.cli.convert import huggingface, vocabulary
from mega_fairseq.cli.convert.families import Family, Options, family_of
from mega_fairseq.cli.output import check_file, write
from mega_fairseq.data.classification.labels import classes_of
from mega_fairseq.models.checkpoints import takes_names
from mega_fairseq.models.embedding import types_of

WRITER = "the released code"


def run(arguments: argparse.Namespace) -> None:
    source, target = arguments.source, arguments.target
    if arguments.to_huggingface:
        return write_folder(arguments)
    check_file(target)
    if os.path.lexists(target):
        if os.path.exists(source) and os.path.exists(target) and os.path.samefile(source, target):
            raise UserError(f"{target} is also the input, and its optimizer state would be lost; give another name")
        if not arguments.force:
            raise UserError(f"{target} exists; add --force to overwrite it, or give another name")
    labels = None if arguments.labels is None else read_labels(arguments.labels)
    with errors_of(source):
        options, tensors = read(source)
        family = huggingface.HuggingFace(options) if os.path.isdir(source) else None
        state, summary = convert(options, tensors, labels, family)
    files = {} if arguments.tokenizer is None else _dictionary_files(arguments, state["model"], summary)
    buffer = io.BytesIO()  # torch.save into a file hides the reason for a failed write
    torch.save(state, buffer)
    for path, content in {**files, target: buffer.getbuffer()}.items():  # the checkpoint when its dictionary is there
        write(path, content)
    print(f"{target}:", *summary, sep="\n  ")


def _dictionary_files(
    arguments: argparse.Namespace, tensors: Mapping[str, Tensor], summary: List[str]
) -> Dict[str, bytes]:
    """fairseq's files for the vocabulary that the user gave, by path: beside the checkpoint."""
    tokenizer, folder = arguments.tokenizer, os.path.dirname(arguments.target)
    if not os.path.isdir(arguments.source):
        raise UserError("--tokenizer has no effect for a checkpoint of the released code; leave it out")
    with errors_of(tokenizer):
        found = vocabulary.read(tokenizer, _rows(tensors))
    files = {os.path.join(folder, name): content for name, content in vocabulary.fairseq_files(found).items()}
    for path in files:
        if os.path.lexists(path) and not arguments.force:
            raise UserError(f"{path} exists; add --force to overwrite it, or write to another folder")
    summary.append(f"{os.path.join(folder, vocabulary.DICT)} is the dictionary, for fairseq-preprocess --srcdict")
    if found.merges is not None:
        vocab, merges = (os.path.join(folder, name) for name in (vocabulary.VOCAB, vocabulary.MERGES))
        if vocab not in files:
            vocab, merges = tokenizer, os.path.join(os.path.dirname(tokenizer), vocabulary.MERGES)
        summary.append(f"text is encoded by --bpe gpt2 --gpt2-encoder-json {vocab} --gpt2-vocab-bpe {merges}")
    elif not found.elsewhere:
        summary.append(f"its types are words, since there is no {vocabulary.MERGES} beside {tokenizer}")
    return files


def _rows(tensors: Mapping[str, Tensor]) -> int:
    return max(types_of(tensors, f"{side}.embed_tokens") for side in ("encoder", "decoder"))


def read(path: str) -> Tuple[Dict[str, Any], Dict[str, Tensor]]:
    """The options and tensors of the released checkpoint, or the folder of Hugging Face's, at `path`."""
    if os.path.isdir(path):
        return huggingface.read(path)
    if os.path.basename(path) in (huggingface.CONFIG, huggingface.SAFE, huggingface.PICKLED):
        raise UserError(f"is one file of a folder of Hugging Face's; give the folder, {os.path.dirname(path) or '.'}")
    if not takes_names():  # numpy has renamed modules since the released checkpoints were written
        raise UserError(
            f"cannot be read by torch {torch.__version__} without executing code in it; convert it with torch 2.6 or "
            "newer (Python 3.11 or newer): the converted checkpoint loads here"
        )
    content = untrusted.load(path, WRITER)
    tensors = untrusted.model_tensors(content, WRITER)
    if content.get("cfg") is not None or not isinstance(content.get("args"), argparse.Namespace):
        raise UserError(
            "was not written by the released code, which stores its options under `args`; if this plugin wrote it, use "
            "it as it is"
        )
    untrusted.check_finite(tensors)
    return vars(content["args"]), tensors


def read_labels(path: str) -> List[str]:
    """The classes in a dictionary of labels that fairseq-preprocess wrote, in order."""
    try:
        classes = classes_of(Dictionary.load(path))
    except Exception:  # of many types, and with advice for training
        raise UserError(f"--labels is {path}, which is not a readable dictionary; give label-bin/dict.txt") from None
    return classes


def convert(
    options: Options,
    tensors: Mapping[str, Tensor],
    labels: Optional[Sequence[str]] = None,
    family: Optional[Family] = None,  # that of `options`, if not given
) -> Tuple[Dict[str, Any], List[str]]:
    """The converted checkpoint, which torch.load reads with weights_only=True, and a summary for the user.

    `labels` are the names of a classifier's classes.
    """
    family = family or family_of(options)
    dtypes = Counter(str(tensor.dtype).split(".")[-1] for tensor in tensors.values())
    try:
        tensors = family.tensors(options, tensors)
    except (LookupError, RuntimeError, ValueError) as error:
        raise UserError(f"contains tensors that do not fit together ({error}); get it again from its source") from None
    cfg = configuration(options, family, tensors)
    plain = OmegaConf.to_container(cfg, resolve=True, enum_to_str=True)
    model = empty_model(Checkpoint(plain, tensors))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    _tie(tensors, model)
    fill(model, tensors)
    task_state = family.task_state(model, cfg.task, labels)
    state = {
        "args": None,  # options of fairseq before 0.10
        "cfg": plain,
        "model": tensors,
        "criterion": None,
        "optimizer_history": [
            {"criterion_name": "", "optimizer_name": "", "lr_scheduler_state": {}, "num_updates": 0},
        ],
        "task_state": task_state,
        "extra_state": {
            "train_iterator": {"version": 2, "epoch": 1, "iterations_in_epoch": 0, "shuffle": True},
            "val_loss": None,
        },
        "last_optimizer_state": None,
    }
    summary = f"{options['arch']}, {parameters:,} parameters, stored as {dtypes.most_common(1)[0][0]}"
    return state, [summary, *family.changes(options, task_state), family.remark(plain)]


def write_folder(arguments: argparse.Namespace) -> None:
    """Write a trained model as a folder that Hugging Face's transformers loads."""
    source, target = arguments.source, arguments.target
    labels = None if arguments.labels is None else read_labels(arguments.labels)
    if os.path.lexists(target) and not (os.path.isdir(target) and (arguments.force or not os.listdir(target))):
        raise UserError(f"{target} exists; give the name of a new folder, or add --force to write into a folder")
    with errors_of(source):
        checkpoint = trained.read(source)
        options, tensors, summary = huggingface.to_huggingface(checkpoint, labels)
        files = huggingface.content(options, tensors)
    if arguments.tokenizer is not None:
        with errors_of(arguments.tokenizer):
            found = vocabulary.read_dictionary(arguments.tokenizer, _rows(checkpoint.tensors))
        files = {**vocabulary.huggingface_files(found), **files}
    os.makedirs(target, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):  # until all other files are new
        os.remove(os.path.join(target, huggingface.CONFIG))
    for name, content in files.items():
        write(os.path.join(target, name), content)
    print(f"{target}:", *summary, sep="\n  ")


# ------------------------------------------------------------------------------------------- options


def configuration(options: Options, family: Family, tensors: Mapping[str, Tensor]) -> DictConfig:
    """fairseq's complete configuration, with the checkpoint's options of model and task. Tensors have our names."""
    config = MODEL_DATACLASS_REGISTRY[family.model]
    chosen = _plain(family.model_options(options, fields(config)))
    chosen.update({name: None for name in PATHS if name in chosen})  # the tensors replace files
    criterion = _plain(family.criterion(options))
    cfg = OmegaConf.structured(FairseqConfig)
    try:
        task = _plain(family.task_options(options, tensors))
        cfg.model, cfg.task = config(**chosen), TASK_DATACLASS_REGISTRY[family.task](**task)
        cfg.criterion = CRITERION_DATACLASS_REGISTRY[criterion["_name"]](**criterion)
    except (OverflowError, TypeError, ValueError) as error:
        raise invalid_options(error) from None
    cfg.model._name, cfg.task._name = family.model, family.task
    family.settle(cfg.model, cfg.task, options)
    if not any(size for name, size in cfg.model.items() if name.endswith("ffn_embed_dim")):
        cfg.model.activation_dropout = 0.0  # the release accepts it also without feed-forward layers
    return cfg


def _plain(chosen: Dict[str, Any]) -> Dict[str, Any]:
    """The options, if none of their values would be looked up elsewhere, as ${NAME} would."""
    for name, value in chosen.items():
        if isinstance(value, str) and ("${" in value or not value.isprintable()):
            raise UserError(f"has {reprlib.repr(value)} for the option {name}; get it again from its source")
    return chosen


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
