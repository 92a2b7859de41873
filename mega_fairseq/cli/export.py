"""`mega-fairseq export`: write a trained model as a folder that `runtime/` runs without PyTorch and fairseq."""

import argparse
import fcntl
import importlib.util
import json
import os
import sys
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, Dict, Iterable, Iterator, List, Optional, Set, Tuple

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
from mega_fairseq.tasks.types_of_training import check_types

UNFINISHED = ".unfinished"
FEW, MANY = 3, 20  # types
TRANSLATION = ("translation", "mega_translation", "mega_document_translation")
LANGUAGE = ("language_modeling", "mega_language_modeling")
NEEDED = {"onnx": "pip install onnx", "mega_runtime": "in a clone of this repository, pip install ./runtime"}


def run(arguments: argparse.Namespace) -> None:
    path, target, pieces = arguments.checkpoint, Path(arguments.folder), arguments.sentencepiece_model
    for package, remedy in NEEDED.items():
        if importlib.util.find_spec(package) is None:
            raise UserError(f"{package} is not installed; {remedy}")
    complete = target / "config.json"  # without it, an export into the folder was interrupted
    is_export = (target / "weights.bin").exists() and (complete.exists() or (target / UNFINISHED).exists())
    exists = os.path.lexists(target)  # also a link to nothing
    try:
        str(target).encode()
    except UnicodeEncodeError:
        raise UserError(f"the name of {str(target)!r} is not UTF-8, which ONNX Runtime needs; give another") from None
    if exists and not (arguments.force and is_export):
        add = "; add --force to replace it, or" if is_export else ";"
        raise UserError(f"{target} exists{add} give the name of a new folder")
    try:
        pieces is None or SentencePieceProcessor().load(pieces)
    except TypeError:
        raise UserError(f"the name of {pieces!r} is not UTF-8, which SentencePiece needs; rename it") from None
    except (OSError, RuntimeError, ValueError):
        raise UserError(
            f"--sentencepiece-model is {pieces or 'empty'}, which is not a SentencePiece model; give its path"
        ) from None
    # A folder that is replaced may be on another file system than its parent.
    unfinished = target / UNFINISHED if exists else target.with_name(target.name + UNFINISHED)
    with alone_in(unfinished):
        try:
            with quiet_output(), errors_of(path):
                differences, doubt = write(unfinished, arguments)
                record(unfinished, differences)
        except BaseException:
            clear(unfinished)
            if not exists or complete.exists():
                unfinished.rmdir()
            raise
        size = sum(file.stat().st_size for file in unfinished.iterdir()) / 1e6
        if exists:
            replace(target, unfinished)
            unfinished.rmdir()
        else:
            unfinished.rename(target)  # which fails if another program has made a folder with files there
    if doubt is not None:
        print(f"warning: {doubt}", file=sys.stderr)
    print(f"wrote {target}, {size:.1f} MB in {arguments.format}")
    shown = (f"{name} {d if isinstance(d, str) else f'{d:.2g}'}" for name, d in differences.items())
    print("differences from the checkpoint:", ", ".join(shown))


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """An empty folder, which no other export writes to meanwhile. It may have files of an export that was killed."""
    from mega_fairseq.export.folder import NAMES  # here, since onnx may be missing

    if os.path.lexists(folder) and (
        folder.is_symlink() or not folder.is_dir() or any(f.name not in NAMES or f.is_dir() for f in folder.iterdir())
    ):
        raise UserError(f"{folder}, where an export is written at first, exists with other files; rename it")
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another export writes {folder}; wait for its end, or give another folder") from None
        clear(folder)
        yield
    finally:
        os.close(lock)


def clear(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()


def replace(target: Path, newer: Path) -> None:
    """Puts an export in the place of an older one.

    Other files of the folder stay, such as a card and the checkpoint. Without config.json, which leaves first and comes
    last, a folder is not complete, and can be exported into again.
    """
    from mega_fairseq.export.folder import NAMES  # here, since onnx may be missing

    (target / "config.json").unlink(missing_ok=True)
    for name in reversed(NAMES):
        if (newer / name).exists():
            (newer / name).replace(target / name)
        else:
            (target / name).unlink(missing_ok=True)


def record(folder: Path, differences: Dict[str, Any]) -> None:
    from mega_fairseq.export.folder import write_config  # here, since onnx may be missing

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    write_config(folder, {**config, "differences": differences})


def write(target: Path, arguments: argparse.Namespace) -> Tuple[Dict[str, Any], Optional[str]]:
    """Writes the folder and compares it with the checkpoint; also what speaks against the segmentation."""
    from mega_fairseq.export import check, folder

    checkpoint, pieces = trained.read(arguments.checkpoint), arguments.sentencepiece_model
    pieces = None if pieces is None else Path(pieces)
    untrusted.check_finite(checkpoint.tensors)
    with torch.no_grad():
        model = fill(empty_model(checkpoint), checkpoint.tensors).float().eval()
    if arguments.bytes and not isinstance(model, MegaLanguageModel):
        raise UserError("is not a language model; leave --bytes out")
    if isinstance(model, MegaTransformerModel):
        checkpoint.check_task(*TRANSLATION)
        task = translation_task(checkpoint, arguments.data)
        task.load_state_dict(checkpoint.task_state)
        take_dictionary(model.encoder, task.source_dictionary, task.cfg.data)
        take_dictionary(model.decoder, task.target_dictionary, task.cfg.data)
        doubt = pieces and check_pieces(pieces, task.source_dictionary, task.target_dictionary)
        documents = separators = None
        changed = {}
        if isinstance(task, MegaDocumentTranslationTask):
            separators = task.separators
            if model.decoder.separators is not None:
                model.decoder.separators = separators
            names = ("separator", "line_length_a", "line_length_b")
            documents = {name: getattr(task.cfg, name) for name in names}
            documents["window_tokens"] = task.cfg.valid_window_tokens or task.cfg.window_tokens
            documents["source_separator"] = separators[0]
            if str(task.cfg.sentence_counts) == "free":
                task.cfg.sentence_counts = "exact"  # as all exports
                changed = {"sentence counts": "exact, not free"}
        languages = task.cfg.source_lang, task.cfg.target_lang
        folder.write_translation(target, model, arguments.format, pieces, documents, separators, languages)
        return {**check.check_translation(target, model, task), **changed}, doubt
    if isinstance(model, MegaLanguageModel):
        checkpoint.check_task(*LANGUAGE)
        if checkpoint.cfg["task"].get("add_bos_token"):
            raise UserError("was trained with --add-bos-token, and exports begin a text without it; train without")
        data = arguments.data or data_of_training(checkpoint)
        take_dictionary(model.decoder, read_dictionary(Path(data) / "dict.txt"), data)
        types = model.decoder.dictionary
        check_types(checkpoint.task_state, data, types)
        doubt = pieces and check_pieces(pieces, types, types)
        if arguments.bytes:
            check_bytes(types)
        elif pieces is None and not not_bytes(types):
            doubt = "all types are numbers below 256, like bytes; with --bytes, the export reads and writes text"
        folder.write_language_model(target, model, arguments.format, pieces, arguments.bytes)
        return check.check_language_model(target, model), doubt
    if pieces is not None:
        raise UserError("is a classifier, whose text is split into types already; leave --sentencepiece-model out")
    classifier = load_classifier(arguments.checkpoint, arguments.data, cpu=True)
    folder.write_classifier(target, classifier, arguments.format)
    return check.check_classifier(target, classifier), None


def translation_task(checkpoint: Checkpoint, data: Optional[str]) -> MegaTranslationTask:
    """The checkpoint's task with the dictionaries of its data; in place of fairseq's own, ours with the same search."""
    stored = checkpoint.cfg.get("task", {})
    config, kind = MegaTranslationConfig, MegaTranslationTask
    if checkpoint.word("task") == "mega_document_translation":
        config, kind = MegaDocumentTranslationConfig, MegaDocumentTranslationTask
    names = {field.name for field in fields(config)} - {"data", "seed"}
    try:
        cfg = config(**{name: value for name, value in stored.items() if name in names})
        cfg.data, cfg.seed = data or data_of_training(checkpoint), 1
    except (TypeError, ValueError) as error:
        raise UserError(f"has a value of the wrong type among its task's ({error}); get the file again") from None
    cfg.source_lang, cfg.target_lang = languages = languages_of(cfg)
    return kind(cfg, *(read_dictionary(Path(cfg.data) / f"dict.{language}.txt") for language in languages))


def data_of_training(checkpoint: Checkpoint) -> str:
    data = checkpoint.cfg.get("task", {}).get("data")
    if not isinstance(data, str):
        raise UserError("does not say where its dictionary is; give the folder of its data as --data")
    return data.split(os.pathsep)[0]


def languages_of(cfg: MegaTranslationConfig) -> Tuple[str, str]:
    """Source and target; without an option, as fairseq-train found them by the names of its files."""
    known = cfg.source_lang, cfg.target_lang
    if None in known and os.path.isdir(cfg.data):
        known = infer_language_pair(cfg.data)
    if None in known:
        why = "has no data of two" if os.path.isdir(cfg.data) else "is no folder"
        raise UserError(
            f"does not say its languages, and {cfg.data} {why}; give the folder that fairseq-preprocess wrote as "
            "--data, with a file such as train.en-de.en.idx"
        )
    return known


def read_dictionary(path: Path) -> Dictionary:
    if not path.is_file():
        raise UserError(f"needs {path}, which is missing; give the folder that fairseq-preprocess wrote as --data")
    try:
        return Dictionary.load(str(path))
    except Exception as error:  # fairseq raises this very class for another encoding
        raise UserError(f"needs {path}, which is damaged ({error}); copy it again") from None


def check_bytes(dictionary: Dictionary) -> None:
    """Refuses bytes if some types of the training are something else."""
    others = len(not_bytes(dictionary))
    if others > FEW:
        types = len(words_of(dictionary))
        raise UserError(f"has {types:,} types, of which {others:,} are not bytes; leave --bytes out")


def not_bytes(dictionary: Dictionary) -> Set[str]:
    return set(words_of(dictionary)) - set(map(str, range(256)))


def check_pieces(path: Path, source: Dictionary, target: Dictionary) -> Optional[str]:
    """Refuses a SentencePiece model if most types of the source are not its pieces, and many pieces are in no type.

    Returns what else speaks against it.

    Words of characters that the model lacks are types of the training, too, and a dictionary of both languages has the
    types of another model. Pieces that BPE always merges with others are no types, but parts of some. More than half,
    or most of the last ones, are in no type only of a larger model.
    """
    model = SentencePieceProcessor(model_file=str(path))
    special = (model.is_control, model.is_unknown, model.is_unused, model.is_byte)
    known = [model.id_to_piece(n) for n in range(len(model))]
    pieces = [piece for n, piece in enumerate(known) if not any(is_kind(n) for is_kind in special)]
    types = words_of(source)
    others, characters = set(types) - set(known), set(pieces)
    foreign = sum(any(character in characters for character in name) for name in others)
    not_in_source = not_in(types, pieces)
    unused = not_in(words_of(target), not_in_source)
    merged = [piece for piece in pieces if len(piece) > 1]
    last = merged[-max(MANY, len(merged) // 20) :]
    larger = 2 * len(unused) > len(pieces) or 4 * sum(piece in unused for piece in last) > 3 * len(last)
    if 2 * len(others) > len(types) and 5 * len(not_in_source) > len(pieces):
        raise UserError(
            f"has {len(types):,} types, of which {len(others):,} are not in {path}; give the SentencePiece model of "
            "its text"
        )
    if foreign <= FEW + len(types) / 50 and not larger:
        return None
    return (
        f"{foreign:,} of {len(types):,} types of the text are not in {path}, and {len(unused):,} of its "
        f"{len(pieces):,} pieces are in no type: it may be another SentencePiece model than that of the training, and "
        "then the output is wrong"
    )


def not_in(types: List[str], pieces: Iterable[str]) -> Set[str]:
    """The pieces that are neither types nor parts of some."""
    known, text = set(types), "\n".join(types)
    return {piece for piece in pieces if piece not in known and piece not in text}  # most are types


def words_of(dictionary: Dictionary) -> List[str]:
    """The types without special ones and fillers."""
    return [name for name in dictionary.symbols[dictionary.nspecial :] if not name.startswith("madeupword")]


def take_dictionary(stack: nn.Module, dictionary: Dictionary, data: str) -> None:
    own, known = len(stack.dictionary), len(dictionary)
    if own != known:
        raise UserError(f"has {own:,} types and the dictionary in {data} {known:,}; give the folder of its training")
    stack.dictionary = dictionary
