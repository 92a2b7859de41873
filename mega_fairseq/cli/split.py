"""A split of binarised text, for commands that read one."""

import hashlib
import os
import re
from typing import Any, Dict, NamedTuple

from fairseq import utils
from fairseq.data import Dictionary
from torch import nn

from mega_fairseq.cli import UserError
from mega_fairseq.data.corpus import Corpus
from mega_fairseq.data.streams import StreamDataset, stream_bounds


class Split(NamedTuple):
    """A split of binarised text, and its dictionary."""

    dictionary: Dictionary
    corpus: Corpus
    origin: Dict[str, Any]  # what identifies it in files

    def streams(self, cut: str) -> StreamDataset:
        kind, _, how = cut.partition(":")
        documents = self.corpus.documents(how if kind == "documents" else "stream")
        bounds = stream_bounds("documents" if kind == "documents" else cut, documents)
        return StreamDataset(self.corpus, bounds, self.dictionary.pad(), self.dictionary.eos()).for_scoring()

    def check_types(self, model: nn.Module) -> None:
        """Refuse a language model of another dictionary; the message continues the name of its checkpoint."""
        types = len(model.decoder.dictionary)
        if types != len(self.dictionary):
            raise UserError(
                f"has {types:,} types and does not fit the {len(self.dictionary):,} types of dict.txt in "
                f"{self.origin['path']}; give the data that it was trained on"
            )


def load_split(data: str, subset: str) -> Split:
    folder = utils.split_paths(data)[0]
    path = os.path.join(folder, "dict.txt")
    try:
        dictionary = Dictionary.load(path)
    except Exception as error:  # fairseq raises anything for damaged files
        raise UserError(
            f"{path} cannot be read ({type(error).__name__}); give a folder that fairseq-preprocess --only-source wrote"
        ) from None
    corpus = Corpus.load(os.path.join(folder, subset), dictionary, combine=subset == "train")  # as in training
    digest = hashlib.sha256("\n".join(dictionary.symbols).encode())
    for numbers in (*corpus.parts, corpus.lines):
        digest.update(str(numbers.dtype).encode())
        digest.update(numbers)
    origin = {
        "path": data,
        "subset": subset,
        "tokens": len(corpus),
        "unit": unit_of(dictionary),
        "fingerprint": digest.hexdigest(),
    }
    return Split(dictionary, corpus, origin)


def unit_of(dictionary: Dictionary) -> str:
    """`byte` if all types are decimal numbers of bytes, as written by examples/lm/to_bytes.py; otherwise `token`."""
    symbols = [s for s in dictionary.symbols[dictionary.nspecial :] if not s.startswith("madeupword")]
    numbers = all(re.fullmatch(r"\d{1,3}", symbol) and int(symbol) < 256 for symbol in symbols)
    return "byte" if symbols and numbers else "token"
