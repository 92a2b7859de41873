"""Pairs of passages of the State of the Union addresses: of the same year (label 1), or of two years of an era (0).

    pairs.py IN OUT

Each passage of a split is the first of one pair. Both passages are of the same split.
"""

import sys
from pathlib import Path
from random import Random
from typing import Iterator, NamedTuple, Sequence


class Passage(NamedTuple):
    text: bytes
    era: str
    year: str


def read(folder: Path, split: str) -> Sequence[Passage]:
    texts = (folder / f"{split}.txt").read_bytes().split(b"\n")[:-1]
    eras, years = ((folder / f"{split}.{name}").read_text().split() for name in ("label", "year"))
    if not len(texts) == len(eras) == len(years):
        sys.exit(f"error: {folder} has {len(texts)}, {len(eras)} and {len(years)} lines of {split}: replace it.")
    return [Passage(*row) for row in zip(texts, eras, years)]


def pairs(passages: Sequence[Passage], random: Random) -> Iterator[Sequence[bytes]]:
    """Label and both texts. Half of the labels are 1, except that a passage may be the only one of its year."""
    labels = [number % 2 for number in range(len(passages))]
    random.shuffle(labels)
    for number, (passage, label) in enumerate(zip(passages, labels)):
        same = [other for other, its in enumerate(passages) if its.year == passage.year and other != number]
        others = [other for other, its in enumerate(passages) if its.year != passage.year and its.era == passage.era]
        label = int(bool(label and same))
        second = passages[random.choice(same if label else others)]
        yield str(label).encode(), passage.text, second.text


def main(source: Path, out: Path) -> None:
    out.mkdir()
    for split in ("train", "valid", "test"):
        columns = zip(*pairs(read(source, split), Random(f"pairs {split}")))
        for name, lines in zip(("label", "input", "input1"), columns):
            (out / f"{split}.{name}").write_bytes(b"".join(line + b"\n" for line in lines))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*map(Path, sys.argv[1:]))
