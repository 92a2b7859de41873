"""Examples of a second from shorter clips: a clip in silence, at a random place and gain, with white noise.

    clips.py IN OUT

Held out are (stretch, pitch) pairs of the synthetic voices, so that no clip is in two splits.
"""

import csv
import sys
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple

import numpy as np

SAMPLES = 16_000
TAKES = 4  # examples of each clip
GAINS = 0.2, 0.7  # the clip's peak; with noise it stays below 1
NOISE = 10.0, 30.0  # dB below the clip
HELD_OUT = {("0.85", "1.18"): "test", ("1.2", "0.85"): "test", ("1.0", "1.0"): "valid"}


class Clip(NamedTuple):
    word: str
    split: str
    samples: np.ndarray  # peak 1


def read(folder: Path) -> Iterator[Clip]:
    content = expanded(np.fromfile(folder / "clips.ulaw", np.uint8))
    with open(folder / "clips.tsv", newline="") as file:
        rows: List[Dict[str, Any]] = list(csv.DictReader(file, delimiter="\t"))
    ends = np.cumsum([int(row["samples"]) for row in rows])
    if ends[-1] != len(content):
        sys.exit(f"error: {folder} has {len(content):,} samples instead of {ends[-1]:,}: replace it.")
    for row, samples in zip(rows, np.split(content, ends)):
        yield Clip(row["word"], HELD_OUT.get((row["stretch"], row["pitch"]), "train"), samples)


def expanded(content: np.ndarray) -> np.ndarray:
    """Bytes of the mu-law -> samples in [-1, 1]."""
    y = 2 * (content / 255) - 1
    return np.sign(y) * (256.0 ** np.abs(y) - 1) / 255


def take(clip: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """One example (16,000,) of 16-bit samples."""
    clip = random.uniform(*GAINS) * clip
    loudness = np.sqrt(np.mean(clip**2)) * 10 ** (-random.uniform(*NOISE) / 20)
    x = random.normal(0, loudness, SAMPLES)
    start = random.integers(SAMPLES - len(clip) + 1)
    x[start : start + len(clip)] += clip
    return np.clip(np.rint(32768 * x), -32768, 32767).astype("<i2")


def main(source: Path, out: Path) -> None:
    clips = list(read(source))
    out.mkdir()
    for number, split in enumerate(("train", "valid", "test")):
        chosen, random = [clip for clip in clips if clip.split == split], np.random.default_rng(number)
        np.save(out / f"{split}.npy", [take(clip.samples, random) for clip in chosen for _ in range(TAKES)])
        (out / f"{split}.label").write_text("".join(f"{clip.word}\n" * TAKES for clip in chosen))
    words = list(dict.fromkeys(clip.word for clip in clips))
    (out / "labels.txt").write_text("".join(f"{word}\n" for word in words))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*map(Path, sys.argv[1:]))
