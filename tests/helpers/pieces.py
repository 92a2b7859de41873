"""SentencePiece models, trained in a moment."""

from pathlib import Path
from typing import Any

import sentencepiece

from tests.helpers.page import CHAPTER

CHAPTERS = CHAPTER.read_text() + CHAPTER.with_name("genesis-6.de.txt").read_text()
LAUGHTER = "haa haaa haaaa haaaaa\n" * 9  # for unions of equal neighbours
FEW_WORDS = "der Haus ist dem Hase\nder Hase ist dem Haus der Hase\n" * 50


def pieces_model(folder: Path, text: str = CHAPTERS + LAUGHTER, **options: Any) -> Path:
    """A model of 300 pieces, or with other options of SentencePiece."""
    folder.mkdir(exist_ok=True)
    given, model = folder / "text", folder / "pieces"
    given.write_text(text)
    options = {"vocab_size": 300, "minloglevel": 2, **options}
    sentencepiece.SentencePieceTrainer.train(input=str(given), model_prefix=str(model), **options)
    return model.with_suffix(".model")


def few_pieces(folder: Path, types: tuple = ()) -> Path:
    """A model of a few words, and with these types."""
    options = {"vocab_size": 18 + len(types), "hard_vocab_limit": False}
    return pieces_model(folder, FEW_WORDS, user_defined_symbols=list(types), **options)
