"""What earlier lines tell a translation model: bits per piece of references, with pretrained/bible-en-de.

    python benchmarks/context.py --json docs/context.json      2 minutes

The model scores each verse of the test set alone, after the earlier verses of its window, source and reference, and
after as many verses of another chapter. The last two are as long, so that their difference is due to what they say.
"""

import math
import random
import sys
import tarfile
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Dict, Iterator, List, Tuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also runs without installation

import numpy as np
import sentencepiece
import torch
from fairseq import checkpoint_utils

from benchmarks.measure import Meter, Row, main
from benchmarks.quality_documents import Line, encoded
from mega_fairseq.data.windows import windows
from mega_fairseq.documents import SEPARATOR, document_borders

ROOT = Path(__file__).resolve().parent.parent
MODEL, BIBLE = ROOT / "pretrained/bible-en-de", ROOT / "examples/wmt16_en_de/bible"
TOKENS = 1024  # of a window, as in training
PRONOUNS = {f"▁{word}" for word in ("er", "sie", "es", "ihn", "ihm", "ihr", "Er", "Sie", "Es", "Ihn", "Ihm", "Ihr")}


def context(meter: Meter) -> Iterator[Row]:
    """Bits per piece of the later lines of windows: alone, after their own lines, after lines of another document"""
    chapters = test_set()
    if meter.quick:
        chapters = [[window[:4] for window in chapter] for chapter in chapters[:2]]
    bits, rng = Bits(), random.Random(1)
    found: Dict[str, List[Tuple[str, float]]] = {"alone": [], "own lines": [], "other lines": []}
    for chapter in chapters:
        others = [window for other in chapters if other is not chapter for window in other]
        for window in chapter:
            for number in range(1, len(window)):
                earlier = {"alone": [], "own lines": window[:number], "other lines": drawn(others, number, rng)}
                for name, lines in earlier.items():
                    found[name] += bits.of_last([*lines, window[number]])
    for case, kept in (("all pieces", None), ("pronouns", PRONOUNS)):
        yield case, {name: fmean([x for piece, x in each if not kept or piece in kept]) for name, each in found.items()}


def test_set() -> List[List[List[Line]]]:
    """The chapters, in windows of at most TOKENS tokens on each side."""
    files = {}
    for archive in ("bible-ende", "bible-ende-documents"):
        with tarfile.open(BIBLE / f"{archive}.tar.xz") as tar:
            members = (member for member in tar if member.isfile())
            files.update({Path(member.name).name: tar.extractfile(member).read().decode() for member in members})
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(MODEL / "pieces.model"))
    texts = (files[f"test.{language}"].splitlines() for language in ("en", "de"))
    lines = encoded(pieces, list(zip(*texts)))
    borders = document_borders(files["test.docs"].splitlines(), "test.docs")
    tokens = [[0, 0], *([len(text.split()) + 1 for text in line] for line in lines)]
    bounds = windows(np.array(borders), np.cumsum(tokens, 0), TOKENS, draw=None, epoch=1).tolist()
    cut = list(zip(bounds, bounds[1:]))
    return [[lines[i:j] for i, j in cut if start <= i < end] for start, end in zip(borders, borders[1:])]


def drawn(among: List[List[Line]], count: int, rng: random.Random) -> List[Line]:
    """So many lines, in order, of windows at random."""
    lines: List[Line] = []
    while len(lines) < count:
        lines += rng.choice(among)
    start = rng.randint(0, len(lines) - count)
    return lines[start : start + count]


class Bits:
    """Scores references with the model."""

    def __init__(self):
        with tempfile.TemporaryDirectory() as data:
            for language in ("en", "de"):
                Path(data, f"dict.{language}.txt").write_text((MODEL / "dict.txt").read_text())
            checkpoint, overrides = str(MODEL / "checkpoint.pt"), {"data": data}
            (self.model,), _, task = checkpoint_utils.load_model_ensemble_and_task(
                [checkpoint], arg_overrides=overrides
            )
        self.model.float().eval()
        self.types = task.target_dictionary

    @torch.no_grad()
    def of_last(self, lines: List[Line]) -> List[Tuple[str, float]]:
        """The pieces of the last line, each with its bits."""
        encode = self.types.encode_line
        joined = (f" {SEPARATOR} ".join(side) for side in zip(*lines))
        source, target = (encode(side, add_if_not_exist=False).long() for side in joined)  # each ends with eos
        scores, _ = self.model(source[None], torch.tensor([len(source)]), target.roll(1)[None])
        bits = -scores[0].log_softmax(-1).gather(-1, target[:, None])[:, 0] / math.log(2)  # (target tokens)
        pieces = lines[-1][1].split()
        return list(zip(pieces, bits[-1 - len(pieces) : -1].tolist()))


if __name__ == "__main__":
    main(__doc__, {"context": context})
