"""Reviews of films (IMDB), as bytes, with the labels `neg` and `pos`; 2,500 training reviews are held out as `valid`.

reviews.py aclImdb OUT
"""

from pathlib import Path
from typing import List

import numpy as np

from mega_fairseq.cli import UserError
from mega_fairseq.cli.prepare import SPLITS, new_folder, run_program, stratified, write_lines

LABELS = ("neg", "pos")
REVIEWS = 12_500  # in each folder
HELD_OUT = 2_500


def reviews(folder: Path) -> List[bytes]:
    """The reviews of a folder, sorted by the names of their files."""
    paths = sorted(folder.glob("*.txt"))
    if len(paths) != REVIEWS:
        raise UserError(f"{folder} has {len(paths):,} reviews instead of {REVIEWS:,}; give the folder aclImdb")
    texts = [path.read_bytes() for path in paths]
    for path, text in zip(paths, texts):
        if not text.strip() or b"\n" in text:
            raise UserError(f"{path} is empty or contains a line break, unlike the published reviews; get it again")
    return texts


def main(source: Path, out: Path) -> None:
    texts = [text for split in ("train", "test") for label in LABELS for text in reviews(source / split / label)]
    labels = 2 * [number for number in range(len(LABELS)) for _ in range(REVIEWS)]
    train = stratified(labels[: 2 * REVIEWS], (2 * REVIEWS - HELD_OUT, HELD_OUT), "text 1")
    members = np.append(train, np.full(2 * REVIEWS, SPLITS.index("test")))
    with new_folder(str(out)) as folder:
        for number, split in enumerate(SPLITS):
            chosen = np.flatnonzero(members == number)
            Path(folder, f"{split}.input").write_bytes(b"".join(texts[i] + b"\n" for i in chosen))
            write_lines(f"{folder}/{split}.label", (LABELS[labels[i]] for i in chosen))
        write_lines(f"{folder}/labels.txt", LABELS)


if __name__ == "__main__":
    run_program(__doc__, main)
