"""Data and models for tests of classifiers: documents as tokens, pairs of documents as bytes, and rows of numbers.

The model of tokens is trained with fairseq's task `sentence_prediction`, the others with `mega_classification`.
"""

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any, List, Sequence

import numpy as np

from tests.helpers.commands import CPU, PLUGIN, SMALL, SYLLABLES, as_words, fairseq

TASK = [*PLUGIN, *CPU, "--task=mega_classification", "--criterion=sentence_prediction"]
STOCK = [*PLUGIN, *CPU, "--task=sentence_prediction", "--criterion=sentence_prediction", "--num-classes=2"]
EXAMPLES = {"train": 203, "valid": 37}  # primes, so that no batch size divides them
UPDATES, WITHIN_EPOCH = 40, 20  # an epoch has 26
SIZES = {f"encoder_{name}": size for name, size in SMALL.items()}
MEGA = {**SIZES, "encoder_hidden_dim": 48, "encoder_z_dim": 16, "encoder_n_dim": 4, "encoder_chunk_size": 5}
AFT = {**SIZES, "encoder_token_mixer": "aft", "encoder_aft_form": "local", "encoder_aft_reach": 4}
NORMED = {"normalization_type": "batchnorm", "normalize_before": True}
OPTIONS = {
    "tokens": {**AFT, "normalization_type": "scalenorm"},
    "bytes": {"input_kind": "bytes", "pairs": True, **MEGA, "normalization_type": "scalenorm"},
    "values": {"input_kind": "values", "values_mean": 0.5, "values_deviation": 0.3, **MEGA, **NORMED},
}
LABELS = ("first", "second$_$")  # matplotlib would read $_$ as mathematics, and fail


def task_of(kind: str) -> List[Any]:
    return STOCK if kind == "tokens" else TASK


def write_tokens(folder: Path, split: str, chance: random.Random, labels: Sequence[str]) -> None:
    """Documents of syllables, most of them the first or the second one."""
    weights = {label: [30 if i == place else 1 for i in range(len(SYLLABLES))] for place, label in enumerate(LABELS)}
    documents = [" ".join(chance.choices(SYLLABLES, weights[label], k=chance.randint(1, 19))) for label in labels]
    (folder / f"{split}.input").write_text("\n".join(documents) + "\n")


def binarise(folder: Path) -> None:
    for name, destination in (("input", "input0"), ("label", "label")):
        files = [f"--{split}pref={folder}/{split}.{name}" for split in EXAMPLES]
        fairseq("preprocess", "--only-source", *files, f"--destdir={folder}/{destination}")


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


def write_data(folder: Path, kind: str) -> None:
    for split, size in EXAMPLES.items():
        chance = random.Random(split)
        labels = chance.choices(LABELS, k=size)
        (folder / f"{split}.label").write_text("\n".join(labels) + "\n")
        {"tokens": write_tokens, "bytes": write_pairs, "values": write_values}[kind](folder, split, chance, labels)
    if kind == "tokens":
        binarise(folder)


def words_of(kind: str, **more: Any) -> List[str]:
    """The options of a training."""
    training = {"optimizer": "adam", "lr": 0.01, "clip_norm": 1, "batch_size": 8, "max_positions": 20, "dropout": 0.1}
    logging = {"log_format": "json", "log_interval": 1, "num_workers": 0}
    given = {"arch": "mega_classifier", **OPTIONS[kind], **training, **logging, **more}
    return [*task_of(kind), *as_words(given)]


def assert_same_predictions(found: List[Any], expected: List[Any], tolerance: float = 1e-5) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected):
        assert list(one.probabilities) == list(other.probabilities)
        np.testing.assert_allclose([*one.probabilities.values()], [*other.probabilities.values()], atol=tolerance)
        assert one.label == other.label
        assert one.probability == one.probabilities[one.label]


def write_and_train(kind: str, place: Path) -> SimpleNamespace:
    data, folder = place / "data", place / "model"
    data.mkdir()
    write_data(data, kind)
    saving = {"save_dir": folder, "save_interval_updates": WITHIN_EPOCH, "max_update": UPDATES}
    said = fairseq("train", data, *words_of(kind, **saving))
    return SimpleNamespace(kind=kind, folder=folder, data=data, last=folder / "checkpoint_last.pt", said=said)
