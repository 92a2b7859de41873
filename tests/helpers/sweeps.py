"""Data and models for tests of sweeps: a text of doubled letters, and models with two position biases."""

import json
import random
from pathlib import Path
from typing import Any, Dict, Tuple

import torch

from tests.helpers.commands import PLUGIN, as_words, fairseq

CHUNK = 8
SIZES = {"layers": 2, "embed_dim": 16, "ffn_embed_dim": 24, "hidden_dim": 24, "z_dim": 8, "n_dim": 2}
TASK = [*PLUGIN, "--task=mega_language_modeling"]
UPDATES = [
    *["--optimizer=adam", "--lr=0.02", "--clip-norm=1", "--max-tokens=200", "--max-update=6", "--cpu"],
    *["--no-epoch-checkpoints", "--disable-validation"],
]


def make_models(place: Path) -> None:
    """Writes the binarised `data`, and `rotary.pt` and `simple.pt`, trained for a few updates."""
    chance = random.Random(1)
    for split, lines in (("train", 60), ("test", 23), ("other", 7)):
        words = [[chance.choice("abcdefghij") for _ in range(chance.randint(0, 30))] for _ in range(lines)]
        text = "".join(" ".join(letter + letter for letter in line) + "\n" for line in words)
        (place / split).write_text(text + "\n" + text[:40] + "\n")
    files = [f"--{split}pref={place / split}" for split in ("train", "test")]
    fairseq("preprocess", "--only-source", *files, f"--validpref={place / 'other'}", f"--destdir={place / 'data'}")
    model = ["--arch=mega_lm_small", *as_words({f"decoder_{name}": size for name, size in SIZES.items()})]
    for bias in ("rotary", "simple"):
        options = [*model, f"--decoder-chunk-size={CHUNK}", f"--rel-pos-bias={bias}", f"--save-dir={place / bias}"]
        fairseq("train", place / "data", *TASK, "--criterion=mega_lm_cross_entropy", *options, *UPDATES)
        content = torch.load(place / bias / "checkpoint_last.pt", weights_only=False)
        for tensor in content["model"].values():
            tensor.mul_(3.0 if tensor.dim() > 1 else 1.0)  # makes the context matter, as more updates would
        torch.save(content, place / f"{bias}.pt")


def points(path: Path) -> Dict[Tuple[int, str], Dict[str, Any]]:
    """The points that a sweep recorded, by chunk and cut."""
    return {(point["chunk"], point["cut"]): point for point in json.loads(path.read_text())["points"]}
