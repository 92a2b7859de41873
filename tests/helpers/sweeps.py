"""Language models for tests of `sweep` and `inspect`, on a text of doubled letters."""

import json
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any, Dict, Tuple

import torch

from tests.helpers.commands import PLUGIN, as_words, fairseq
from tests.helpers.small_models import language_model, mixer_of, mixer_options

CHUNK = 8
SIZES = {"layers": 2, "embed_dim": 16, "ffn_embed_dim": 24, "hidden_dim": 24, "z_dim": 8, "n_dim": 2}
TASK = [*PLUGIN, "--task=mega_language_modeling"]
TRAINING = [
    *["--optimizer=adam", "--lr=0.02", "--clip-norm=1", "--max-tokens=200", "--max-update=6", "--cpu"],
    *["--criterion=mega_lm_cross_entropy", "--no-epoch-checkpoints", "--disable-validation"],
]


def make_models(place: Path) -> Path:
    """Writes the binarised `data`, `rotary.pt`, trained for a few updates, and `simple.pt`, with random weights."""
    chance = random.Random(1)
    for split, lines in (("train", 60), ("test", 23), ("other", 7)):
        words = [[chance.choice("abcdefghij") for _ in range(chance.randint(0, 30))] for _ in range(lines)]
        text = "".join(" ".join(letter + letter for letter in line) + "\n" for line in words)
        (place / split).write_text(text + "\n" + text[:40] + "\n")
    files = [f"--{split}pref={place / split}" for split in ("train", "test")]
    fairseq("preprocess", "--only-source", *files, f"--validpref={place / 'other'}", f"--destdir={place / 'data'}")
    sizes = as_words({f"decoder_{name}": size for name, size in SIZES.items()})
    model = ["--arch=mega_lm_small", *sizes, f"--decoder-chunk-size={CHUNK}", "--rel-pos-bias=rotary"]
    fairseq("train", place / "data", *TASK, *model, *TRAINING, f"--save-dir={place}")
    content = torch.load(place / "checkpoint_last.pt", weights_only=False)
    for tensor in content["model"].values():
        tensor.mul_(3.0 if tensor.dim() > 1 else 1.0)  # makes the context matter, as more updates would
    torch.save(content, place / "rotary.pt")
    language_checkpoint(place / "rotary.pt", place / "simple.pt", "mega", rel_pos_bias="simple")
    return place


def language_checkpoint(trained: Path, target: Path, name: str, **options: Any) -> Path:
    """Writes a checkpoint with the mixer EXAMPLES[name] and random weights, and all else of a trained model."""
    mixer = {**mixer_options(name, "decoder"), "token_mixer": mixer_of(name)}
    if mixer["decoder_chunk_size"] > 0:
        mixer["decoder_chunk_size"] = CHUNK
    both = {"share_decoder_input_output_embed": True, "max_target_positions": 2048}
    content = torch.load(trained, weights_only=False)
    model = language_model(content["model"]["decoder.embed_tokens.weight"].size(0), **{**mixer, **both, **options})
    content["model"] = model.state_dict()
    content["cfg"]["model"].update({**asdict(model.decoder.cfg), "_name": "mega_lm"})
    content["last_optimizer_state"] = None
    torch.save(content, target)
    return target


def points(path: Path) -> Dict[Tuple[int, str], Dict[str, Any]]:
    """The points that a sweep recorded, by chunk and cut."""
    return {(point["chunk"], point["cut"]): point for point in json.loads(path.read_text())["points"]}
