"""`mega-fairseq export`: write a trained model as a folder that `runtime/` runs without PyTorch and fairseq."""

import argparse
import importlib.util
import json
import os
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any, Callable, Dict, Optional, Tuple

import torch
from fairseq.data import Dictionary
from fairseq.data.data_utils import infer_language_pair
from sentencepiece import SentencePieceProcessor
from torch import nn

from mega_fairseq.cli import UserError, errors_of
from mega_fairseq.cli.checkpoint import trained, untrusted
from mega_fairseq.cli.checkpoint.build import empty_model, fill
from mega_fairseq.cli.checkpoint.trained import Checkpoint
from mega_fairseq.cli.classify import load as load_classifier
from mega_fairseq.cli.output import quiet_output
from mega_fairseq.models import MegaLanguageModel, MegaTransformerModel
from mega_fairseq.tasks.mega_document_translation import MegaDocumentTranslationConfig, MegaDocumentTranslationTask
from mega_fairseq.tasks.mega_translation import MegaTranslationConfig, MegaTranslationTask

Export = Callable[[Path], Dict[str, Any]]  # writes a folder and checks it
NEEDED = {"onnx": "pip install onnx", "mega_runtime": "in a clone of this repository, pip install ./runtime"}


def run(arguments: argparse.Namespace) -> None:
    path, target = arguments.checkpoint, Path(arguments.folder)
    for package, remedy in NEEDED.items():
        if importlib.util.find_spec(package) is None:
            raise UserError(f"{package} is not installed; {remedy}")
    if target.exists() and not (arguments.force and (target / "config.json").exists()):
        add = "; add --force to replace it, or" if (target / "config.json").exists() else ";"
        raise UserError(f"{target} exists{add} give the name of a new folder")
    if arguments.sentencepiece_model is not None:
        _check_pieces(arguments.sentencepiece_model)
    with errors_of(path):
        checkpoint = trained.read(path)
        untrusted.check_finite(checkpoint.tensors)
        with torch.no_grad():
            model = fill(empty_model(checkpoint), checkpoint.tensors).float().eval()
        export = exporter(model, checkpoint, arguments)
    unfinished = target.with_name(f"{target.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        with quiet_output():
            differences = export(unfinished)
            record(unfinished, differences)
        if target.exists():
            shutil.rmtree(target)
        unfinished.rename(target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    size = sum(file.stat().st_size for file in target.iterdir()) / 1e6
    print(f"wrote {target}, {size:.1f} MB in {arguments.format}")
    print("differences from the checkpoint:", ", ".join(f"{name} {_shown(d)}" for name, d in differences.items()))


def record(folder: Path, differences: Dict[str, Any]) -> None:
    path = folder / "config.json"
    config = {**json.loads(path.read_text(encoding="utf-8")), "differences": differences}
    path.write_text(json.dumps(config, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _check_pieces(path: str) -> None:
    try:
        SentencePieceProcessor(model_file=path)
    except (OSError, RuntimeError):
        raise UserError(f"--sentencepiece-model is {path}, which is not a SentencePiece model; give its path") from None


def _shown(difference: Any) -> str:
    return difference if isinstance(difference, str) else f"{difference:.2g}"


def exporter(model: nn.Module, checkpoint: Checkpoint, arguments: argparse.Namespace) -> Export:
    if isinstance(model, MegaTransformerModel):
        return _translation(model, checkpoint, arguments)
    if isinstance(model, MegaLanguageModel):
        return _language_model(model, arguments)
    return _classifier(arguments)


# ------------------------------------------------------------------------------------------- translation


def _translation(model: MegaTransformerModel, checkpoint: Checkpoint, arguments: argparse.Namespace) -> Export:
    from mega_fairseq.export import check, folder  # here, since onnx may be missing

    task = _translation_task(checkpoint, arguments.data)
    stacks = ((model.encoder, task.source_dictionary), (model.decoder, task.target_dictionary))
    for stack, dictionary in stacks:
        _check_types(len(stack.dictionary), len(dictionary), task.cfg.data)
        stack.dictionary = dictionary
    documents = separators = None
    if isinstance(task, MegaDocumentTranslationTask):
        separators = task.separators
        if model.decoder.separators is not None:
            model.decoder.separators = separators
        names = ("separator", "line_length_a", "line_length_b")
        documents = {name: getattr(task.cfg, name) for name in names}
        documents["window_tokens"] = task.cfg.valid_window_tokens or task.cfg.window_tokens
        documents["source_separator"] = separators[0]

    def export(target: Path) -> Dict[str, Any]:
        pieces = _path(arguments.sentencepiece_model)
        folder.write_translation(target, model, arguments.format, pieces, documents, separators)
        return check.check_translation(target, model, task)

    return export


def _translation_task(checkpoint: Checkpoint, data: Optional[str]) -> MegaTranslationTask:
    """The checkpoint's task with the dictionaries of its data; in place of fairseq's own, ours with the same search."""
    stored = checkpoint.cfg.get("task", {})
    documents = checkpoint.word("task") == "mega_document_translation"
    config, kind = MegaTranslationConfig, MegaTranslationTask
    if documents:
        config, kind = MegaDocumentTranslationConfig, MegaDocumentTranslationTask
    names = {field.name for field in fields(config)} - {"data", "seed"}
    try:
        cfg = config(**{name: value for name, value in stored.items() if name in names})
        cfg.data, cfg.seed = data or str(stored["data"]).split(os.pathsep)[0], 1
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"has a value of the wrong type among its task's ({error}); get the file again") from None
    return kind(cfg, *(read_dictionary(Path(cfg.data) / f"dict.{language}.txt") for language in _languages(cfg)))


def _languages(cfg: MegaTranslationConfig) -> Tuple[str, str]:
    """Source and target; without an option, as fairseq-train found them by the names of its files."""
    known = cfg.source_lang, cfg.target_lang
    if None in known and os.path.isdir(cfg.data):
        known = infer_language_pair(cfg.data)
    if None in known:
        raise UserError(
            f"does not say its languages, and {cfg.data} has no data of two; give the folder that fairseq-preprocess "
            "wrote as --data"
        )
    return known


# ------------------------------------------------------------------------------------------- language models


def _language_model(model: MegaLanguageModel, arguments: argparse.Namespace) -> Export:
    from mega_fairseq.export import check, folder

    if arguments.data is None:
        raise UserError("is a language model, whose dictionary is not in it; give the folder of its data as --data")
    dictionary = read_dictionary(Path(arguments.data) / "dict.txt")
    _check_types(len(model.decoder.dictionary), len(dictionary), arguments.data)
    model.decoder.dictionary = dictionary

    def export(target: Path) -> Dict[str, Any]:
        pieces = _path(arguments.sentencepiece_model)
        folder.write_language_model(target, model, arguments.format, pieces, arguments.bytes)
        return check.check_language_model(target, model)

    return export


# ------------------------------------------------------------------------------------------- classifiers


def _classifier(arguments: argparse.Namespace) -> Export:
    from mega_fairseq.export import check, folder

    classifier = load_classifier(arguments.checkpoint, arguments.data, cpu=True)

    def export(target: Path) -> Dict[str, Any]:
        folder.write_classifier(target, classifier, arguments.format)
        return check.check_classifier(target, classifier)

    return export


# ------------------------------------------------------------------------------------------- shared


def read_dictionary(path: Path) -> Dictionary:
    if not path.is_file():
        raise UserError(f"needs {path}, which is missing; give the folder that fairseq-preprocess wrote as --data")
    try:
        return Dictionary.load(str(path))
    except Exception as error:  # fairseq raises this very class for another encoding
        raise UserError(f"needs {path}, which is damaged ({error}); copy it again") from None


def _check_types(own: int, known: int, data: str) -> None:
    if own != known:
        raise UserError(f"has {own:,} types and the dictionary in {data} {known:,}; give the folder of its training")


def _path(name: Optional[str]) -> Optional[Path]:
    return None if name is None else Path(name)
