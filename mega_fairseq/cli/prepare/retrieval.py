"""`mega-fairseq prepare retrieval`: does one paper cite the other, from the bytes of both? (ACL Anthology Network)"""

import argparse
from typing import Any, Dict, List

from mega_fairseq.cli.prepare.folder import Folder
from mega_fairseq.cli.prepare.tables import Table
from mega_fairseq.cli.prepare.tables import prepare as prepare_table

FILES = ("new_aan_pairs.train.tsv", "new_aan_pairs.eval.tsv", "new_aan_pairs.test.tsv")
ROWS = (147_086, 0, 0)  # the numbers of the others are not published
LONGEST = 4_000  # bytes of a document


def settings(arguments: argparse.Namespace) -> Dict[str, Any]:
    return {}


def prepare(arguments: argparse.Namespace, folder: Folder) -> None:
    remedy = "give the folder with new_aan_pairs.{train,eval,test}.tsv, which are in the archive lra_release.gz"
    prepare_table(arguments, folder, Table(FILES, b"", ROWS, ("label", "input", "input1"), convert, remedy))


def convert(row: List[bytes]) -> List[bytes]:
    if len(row) != 5:
        raise ValueError(f"has {len(row)} columns instead of 5")
    label, _, _, *texts = row
    if label not in (b"0", b"1", b"0.0", b"1.0"):
        raise ValueError(f"has the label {label[:20].decode(errors='replace')!r} instead of 0.0 or 1.0")
    if not all(text.strip() for text in texts):
        raise ValueError("has an empty document")
    return [label[:1], *(text[:LONGEST] for text in texts)]
