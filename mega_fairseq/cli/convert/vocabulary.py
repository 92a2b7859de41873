"""Vocabularies in both directions: Hugging Face's vocab.json or tokenizer.json, and fairseq's dict.txt.

Rows of the embeddings keep their numbers. fairseq's dictionary begins with four symbols that dict.txt does not list,
and RoBERTa's vocabulary, which Hugging Face's Mega uses, begins with the same four. With byte-level BPE, fairseq's
--bpe gpt2 and --bpe hf_byte_bpe write the number of each piece in vocab.json: these numbers are the words of dict.txt.
"""

import json
import os
import re
from typing import Any, Dict, List, NamedTuple, Optional

from fairseq.data import Dictionary

from mega_fairseq.cli import UserError

FIRST = ("<s>", "<pad>", "</s>", "<unk>")  # of fairseq's dictionary
MASK = "<mask>"
DICT, VOCAB, MERGES, TOKENIZER = "dict.txt", "vocab.json", "merges.txt", "tokenizer.json"
ADDED = "added_tokens.json"  # types that a vocab.json lacks
FILLER = "madeupword"  # and its number: fairseq's name of a row without a type
BPE_FILES = ((VOCAB, MERGES), ("encoder.json", "vocab.bpe"))  # Hugging Face's and fairseq's names


class Vocabulary(NamedTuple):
    """Types in the order of the embeddings."""

    types: List[str]
    merges: Optional[List[str]]  # of byte-level BPE, as lines of merges.txt; None if types are words
    elsewhere: bool = False  # not all types are in a vocab.json, which fairseq's --bpe reads


def read(path: str, rows: int) -> Vocabulary:
    """The vocabulary in a tokenizer.json, or in a vocab.json with the merges.txt and added_tokens.json beside it."""
    numbers, folder = _json(path), os.path.dirname(path)
    in_one_file = isinstance(numbers, dict) and isinstance(numbers.get("model"), dict)
    if in_one_file:
        (numbers, merges), added = _tokenizer(numbers), {}
    else:
        merges, added = _merges(os.path.join(folder, MERGES)), _beside(folder, ADDED)
    if isinstance(numbers, dict):
        numbers = {**numbers, **added}
    fits = isinstance(numbers, dict) and all(type(number) is int for number in numbers.values())
    if not fits or len(set(numbers.values())) < len(numbers) or any(not 0 <= n < rows for n in numbers.values()):
        raise UserError(
            f"is not the vocabulary of this model, which has {rows:,} types: a {VOCAB} has a number below that for "
            "each type; give the one of this model"
        )
    types = {number: token for token, number in numbers.items()}
    if any(types.get(number) != token for number, token in enumerate(FIRST)):
        found = ", ".join(repr(types.get(number)) for number in range(len(FIRST)))
        raise UserError(
            f"begins with {found}, and fairseq's dictionary with {', '.join(FIRST)}; train with a vocabulary that "
            "begins with these, as RoBERTa's does"
        )
    if merges is None and any(re.search(r"\s", token) or not token for token in numbers):
        raise UserError(
            f"has types with spaces, which {DICT} cannot contain; give a {VOCAB} with its {MERGES}, or words"
        )
    tokens = [types.get(number, f"{FILLER}{number:04d}") for number in range(rows)]
    return Vocabulary(tokens, merges, in_one_file or bool(added))


def _tokenizer(content: Dict[str, Any]) -> tuple:
    """Numbers and merges of a tokenizer.json."""
    model, kind = content["model"], content["model"].get("type")
    numbers, merges = model.get("vocab"), model.get("merges")
    bytewise = "ByteLevel" in json.dumps([content.get("pre_tokenizer"), content.get("decoder")])
    if kind not in ("BPE", "WordLevel") or (kind == "BPE" and not (bytewise and isinstance(merges, list))):
        raise UserError(
            f"is a tokenizer of type {kind!r}{'' if kind != 'BPE' else ' without bytes'}, which fairseq does not have; "
            "give one with byte-level BPE or whole words"
        )
    if isinstance(numbers, dict):
        added = content.get("added_tokens")
        added = [each for each in (added if isinstance(added, list) else []) if isinstance(each, dict)]
        numbers = {**numbers, **{str(each.get("content")): each.get("id") for each in added}}
    if kind == "WordLevel":
        return numbers, None
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in merges]
    if any(not isinstance(merge, list) or list(map(type, merge)) != [str, str] for merge in merges):
        raise UserError("has merges that are not pairs of pieces; copy or download it again")
    return numbers, list(map(" ".join, merges))


def _json(path: str) -> Any:
    try:
        with open(path, "rb") as file:
            return json.load(file)
    except (OSError, RecursionError, ValueError):
        raise UserError(f"is not readable as JSON; give a {VOCAB} or {TOKENIZER}") from None


def _merges(path: str) -> Optional[List[str]]:
    """The lines of a file of merges; None if there is no such file."""
    if not os.path.lexists(path):
        return None
    try:
        with open(path, encoding="utf-8") as file:
            lines = file.read().split("\n")
        merges = [line for line in lines[lines[0].startswith("#version") :] if line]
        if all(len(line.split(" ")) == 2 for line in merges):
            return merges
        error: Any = "its lines are not pairs"
    except (OSError, ValueError) as caught:
        error = caught
    raise UserError(f"has a {os.path.basename(path)} beside it that cannot be read ({error}); get it again")


def fairseq_files(vocabulary: Vocabulary) -> Dict[str, bytes]:
    """The dictionary, and the two files that fairseq's --bpe reads unless the user has them."""
    types, merges, elsewhere = vocabulary
    named = [merges is None or token == MASK or token.startswith(FILLER) for token in types]
    words = [token if keep else str(number) for number, (token, keep) in enumerate(zip(types, named))]
    files = {DICT: "".join(f"{word} 1\n" for word in words[len(FIRST) :]).encode()}
    return {**files, **(huggingface_files(vocabulary) if elsewhere and merges is not None else {})}


# ------------------------------------------------------------------------------------------- the other direction


def read_dictionary(path: str, rows: int) -> Vocabulary:
    """The vocabulary in fairseq's dict.txt, with the files of its BPE beside it if there are some."""
    try:
        words = Dictionary.load(path).symbols
    except Exception:  # of many types, and with advice for training
        raise UserError(f"is not a readable dictionary; give the {DICT} of the training") from None
    if MASK not in words and len(words) + 1 == rows:
        words = [*words, MASK]  # fairseq's tasks add it
    if len(words) != rows:
        raise UserError(f"has {len(words):,} types and the model {rows:,}; give the {DICT} of its training")
    folder, pieces = os.path.dirname(path), [word for word in words if word.isdigit()]
    for vocab, merges in BPE_FILES:
        found = _merges(os.path.join(folder, merges))
        if found is not None and os.path.isfile(os.path.join(folder, vocab)):
            tokens = {str(number): token for token, number in _beside(folder, vocab).items()}
            if all(piece in tokens for piece in pieces):
                return Vocabulary([tokens.get(word, word) for word in words], found)
    if len(pieces) > len(words) / 2:
        raise UserError(
            f"contains numbers of pieces; put the {VOCAB} and {MERGES} of the BPE (or encoder.json and vocab.bpe) "
            "beside it"
        )
    return Vocabulary(list(words), None)


def _beside(folder: str, name: str) -> Dict[str, Any]:
    """The number of each token in a file of the folder; empty if there is no such file."""
    path = os.path.join(folder, name)
    try:
        content = _json(path) if os.path.lexists(path) else {}
    except UserError:
        content = None
    if not isinstance(content, dict):
        raise UserError(f"has a {name} beside it that is not a vocabulary; copy or download it again")
    return content


def huggingface_files(vocabulary: Vocabulary) -> Dict[str, bytes]:
    """The files that transformers' RobertaTokenizer reads."""
    numbers = {token: number for number, token in enumerate(vocabulary.types)}
    files = {VOCAB: json.dumps(numbers, ensure_ascii=False).encode()}
    if vocabulary.merges is not None:
        files[MERGES] = "\n".join(["#version: 0.2", *vocabulary.merges, ""]).encode()
    return files
