"""`mega-fairseq prepare text`: is a review of a film negative or positive, from its bytes? (IMDB)"""

import argparse
from itertools import compress
from typing import Dict, Iterable, Sequence, Tuple

import numpy as np

from mega_fairseq.cli import UserError
from mega_fairseq.cli.prepare.folder import SPLITS, Folder, batches, column
from mega_fairseq.cli.prepare.source import Place, Source
from mega_fairseq.cli.prepare.splits import stratified

SOURCE = Source("aclImdb", "aclImdb_v1.tar.gz")
LABELS = ("neg", "pos")
REVIEWS = 12_500  # in each folder
HELD_OUT = 2_500
PART = 500  # reviews


def settings(arguments: argparse.Namespace) -> Dict[str, int]:
    return {"seed": arguments.seed}


def prepare(arguments: argparse.Namespace, folder: Folder) -> None:
    names = [f"{split}/{label}" for split in ("train", "test") for label in LABELS]
    found = SOURCE.find(arguments.source, names, ".txt", folder)
    for name, places in found.items():
        if len(places) != REVIEWS:
            raise UserError(
                f"{arguments.source} has {len(places):,} reviews in {name} instead of {REVIEWS:,}; {SOURCE.remedy}"
            )
    reviews = [(name.split("/")[1], place) for name, places in found.items() for place in places]
    folder.make(make_part, batches(reviews, PART), arguments.workers, PART)
    sizes = (2 * REVIEWS - HELD_OUT, HELD_OUT)
    train = stratified([0] * REVIEWS + [1] * REVIEWS, sizes, f"text {arguments.seed}")
    members = np.append(train, np.full(2 * REVIEWS, 2))
    files: Dict[str, Iterable[bytes]] = {"labels.txt": (f"{label}\n".encode() for label in LABELS)}
    for number, split in enumerate(SPLITS):
        for place, name in enumerate(("label", "input")):
            files[f"{split}.{name}"] = column(compress(folder.lines(), members == number), place)
    folder.finish(files, dict(zip(SPLITS, (*sizes, 2 * REVIEWS))))
    print(
        f"valid is {HELD_OUT:,} of the {2 * REVIEWS:,} published training reviews, so that the test set is not used "
        "for model selection"
    )


def make_part(reviews: Sequence[Tuple[str, Place]]) -> bytes:
    """Lines of label, tab and review."""
    lines = []
    for label, place in reviews:
        text = place.read()
        if not text.strip() or b"\n" in text:
            what = "contains a line break" if text.strip() else "is empty"
            raise UserError(f"{place.name} {what}, unlike the published reviews; {SOURCE.remedy}")
        lines.append(b"%s\t%s\n" % (label.encode(), text))
    return b"".join(lines)
