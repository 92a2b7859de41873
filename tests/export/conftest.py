"""Fixtures for several files about exported models."""

import random

import pytest
import sentencepiece


@pytest.fixture(scope="session")
def pieces_model(tmp_path_factory):
    """A SentencePiece model of a few words."""
    return pieces_of(tmp_path_factory.mktemp("pieces"))


def pieces_of(folder, types=()):
    """A SentencePiece model of a few words, and with these types."""
    chance = random.Random(1)
    text = [" ".join(chance.choice(["der", "dem", "Haus", "Hase", "ist"]) for _ in range(9)) for _ in range(50)]
    (folder / "text").write_text("\n".join(text))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text"), model_prefix=str(folder / "pieces"), vocab_size=18 + len(types), minloglevel=2,
        user_defined_symbols=list(types), hard_vocab_limit=False,
    )  # fmt: skip
    return folder / "pieces.model"
