"""Data and models for tests of encoders: sentences in GPT-2's BPE, in which two words alternate, and their classes."""

import functools
import json
import random
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, List

from fairseq.data.encoders.gpt2_bpe import GPT2BPE, GPT2BPEConfig

from tests.helpers.commands import CPU, PLUGIN, SMALL, SYLLABLES, as_words, fairseq

SPACE = "\u0120"  # as GPT-2 writes it
SENTENCES = {"train": 211, "valid": 31}  # primes, so that no batch size divides them
UPDATES, WITHIN_EPOCH = 100, 93
SIZES = {f"encoder_{name}": size for name, size in {**SMALL, "hidden_dim": 48, "z_dim": 16, "n_dim": 4}.items()}
TRAINING = {
    "arch": "mega_encoder_small", **SIZES, "encoder_chunk_size": 5, "dropout": 0, "optimizer": "adam", "lr": 0.02,
    "clip_norm": 1, "batch_size": 8, "log_format": "json", "log_interval": 1, "num_workers": 0,
}  # fmt: skip
MASKED_LM = {
    "task": "masked_lm", "criterion": "masked_lm", "tokens_per_sample": 40, "sample_break_mode": "complete",
    "mask_prob": 0.3,
}  # fmt: skip
NAME = "sentence_prediction"
FINE_TUNING = {"task": NAME, "criterion": NAME, "num_classes": 2, "max_positions": 40, "init_token": 0}


def words_of(*groups: dict, **more: Any) -> List[Any]:
    """The options of a training."""
    given = dict(TRAINING)
    for group in (*groups, more):
        given.update(group)
    return [*PLUGIN, *CPU, *as_words(given)]


LETTERS = sorted(set("".join(SYLLABLES)))
PIECES = [SPACE, *LETTERS, *SYLLABLES, *(SPACE + syllable for syllable in SYLLABLES)]
WORDS = [a + b for a, b in zip(SYLLABLES[::3], SYLLABLES[1::3])]


def starts_word(symbol: str) -> bool:
    """Whether a symbol of the dictionary is no piece within a word."""
    return not symbol.isdecimal() or PIECES[int(symbol)].startswith(SPACE)


def write_bpe(folder: Path) -> GPT2BPE:
    """The files of a BPE whose pieces are syllables, those that start a word with the space before them."""
    (folder / "encoder.json").write_text(json.dumps({piece: number for number, piece in enumerate(PIECES)}))
    merges = [*map(" ".join, SYLLABLES), *(f"{SPACE} {syllable}" for syllable in SYLLABLES)]
    (folder / "vocab.bpe").write_text("\n".join(["#version", *merges, ""]))
    files = bpe_options(folder)
    return GPT2BPE(GPT2BPEConfig(**{name: str(files[name]) for name in ("gpt2_encoder_json", "gpt2_vocab_bpe")}))


def bpe_options(folder: Path) -> dict:
    return {"bpe": "gpt2", "gpt2_encoder_json": folder / "encoder.json", "gpt2_vocab_bpe": folder / "vocab.bpe"}


def write_data(folder: Path) -> None:
    """Two words in turn; the class is that of the first one's vowel."""
    bpe = write_bpe(folder)
    for split, size in SENTENCES.items():
        chance, sentences, labels = random.Random(split), [], []
        for _ in range(size):
            first, second = chance.choices(WORDS, k=2)
            sentences.append(" ".join([first, second] * chance.randint(2, 5)))
            labels.append("dark" if first[1] in "ou" else "light")
        (folder / f"{split}.text").write_text("\n".join(sentences) + "\n")
        (folder / f"{split}.input").write_text("\n".join(map(bpe.encode, sentences)) + "\n")
        (folder / f"{split}.label").write_text("\n".join(labels) + "\n")

    def binarise(name: str, destination: Path, *words: Any) -> None:
        files = [f"--{split}pref={folder}/{split}.{name}" for split in SENTENCES]
        fairseq("preprocess", "--only-source", *files, f"--destdir={destination}", *words)

    binarise("input", folder / "text")
    binarise("input", folder / "classes/input0", "--srcdict", folder / "text/dict.txt")
    binarise("label", folder / "classes/label")


@functools.lru_cache(maxsize=None)
def pretrained() -> SimpleNamespace:
    """A masked language model, trained once per test process."""
    temporary = tempfile.TemporaryDirectory()
    folder = Path(temporary.name)
    write_data(folder)
    saving = {"save_dir": folder / "model", "save_interval_updates": WITHIN_EPOCH, "max_update": UPDATES}
    said = fairseq("train", folder / "text", *words_of(MASKED_LM, bpe_options(folder), saving))
    last = folder / "model/checkpoint_last.pt"
    return SimpleNamespace(
        temporary=temporary, folder=folder, text=folder / "text", classes=folder / "classes", last=last, said=said
    )
