"""Data and models for tests of the task `mega_classification`: pairs of documents as bytes, and rows of numbers."""

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any, List, Sequence

import numpy as np

from tests.commands import PLUGIN, SMALL, as_words, fairseq

TASK = [*PLUGIN, "--cpu", "--task=mega_classification", "--criterion=sentence_prediction"]
EXAMPLES = {"train": 203, "valid": 37}  # primes, so that no batch size divides them
UPDATES, WITHIN_EPOCH = 40, 20  # an epoch has 26
SIZES = {f"encoder_{name}": size for name, size in SMALL.items()}
MEGA = {**SIZES, "encoder_hidden_dim": 48, "encoder_z_dim": 16, "encoder_n_dim": 4, "encoder_chunk_size": 5}
OPTIONS = {
    "bytes": {"pairs": True, "normalization_type": "scalenorm"},
    "values": {
        "normalization_type": "batchnorm",
        "normalize_before": True,
        "values_mean": 0.5,
        "values_deviation": 0.3,
    },
}
LABELS = ("first", "second")


def write_pairs(folder: Path, split: str, chance: random.Random, labels: Sequence[str]) -> None:
    """Pairs of documents of which one has many vowels; the label says which."""
    documents = []
    for label in labels:
        rich, poor = ("".join(chance.choices("aeiou" * many + "bdgkm", k=chance.randint(2, 19))) for many in (5, 1))
        documents.append((rich, poor) if label == "first" else (poor, rich))
    for name, column in zip(("input", "input1"), zip(*documents)):
        (folder / f"{split}.{name}").write_text("\n".join(column) + "\n")


def write_values(folder: Path, split: str, chance: random.Random, labels: Sequence[str]) -> None:
    """Rows of 17 bytes; the larger ones are in the first or second half."""
    low, high = ([[chance.randrange(start, start + 156) for _ in range(8)] for _ in labels] for start in (0, 100))
    halves = [(b, a) if label == "first" else (a, b) for label, a, b in zip(labels, low, high)]
    np.save(folder / f"{split}.npy", np.array([[*one, 127, *other] for one, other in halves], dtype=np.uint8))


def write_data(folder: Path, kind: str) -> Path:
    for split, size in EXAMPLES.items():
        chance = random.Random(split)
        labels = chance.choices(LABELS, k=size)
        (folder / f"{split}.label").write_text("\n".join(labels) + "\n")
        {"bytes": write_pairs, "values": write_values}[kind](folder, split, chance, labels)
    return folder


def words_of(kind: str, **more: Any) -> List[str]:
    """The options of a training."""
    training = {"optimizer": "adam", "lr": 0.01, "clip_norm": 1, "batch_size": 8, "max_positions": 20, "dropout": 0.1}
    logging = {"log_format": "json", "log_interval": 1, "num_workers": 0}
    given = {"arch": "mega_classifier", "input_kind": kind, **MEGA, **OPTIONS[kind], **training, **logging, **more}
    return [*TASK, *as_words(given)]


def train(folder: Path, data: Path, kind: str) -> SimpleNamespace:
    saving = {"save_dir": folder, "save_interval_updates": WITHIN_EPOCH, "max_update": UPDATES}
    said = fairseq("train", data, *words_of(kind, **saving))
    return SimpleNamespace(kind=kind, folder=folder, data=data, last=folder / "checkpoint_last.pt", said=said)
