"""Pairs of papers (ACL Anthology Network), as bytes: the label is 1 if one cites the other, else 0.

    papers.py FOLDER OUT

FOLDER has new_aan_pairs.train.tsv, new_aan_pairs.eval.tsv and new_aan_pairs.test.tsv of the archive lra_release.gz.
"""

from pathlib import Path
from typing import List

from mega_fairseq.cli import UserError
from mega_fairseq.cli.prepare import new_folder, run_program

FILES = {"train": "new_aan_pairs.train.tsv", "valid": "new_aan_pairs.eval.tsv", "test": "new_aan_pairs.test.tsv"}
TRAINING = 147_086  # rows; the numbers of the others are not published
LONGEST = 4_000  # bytes of a document


def columns(row: bytes) -> List[bytes]:
    """Label and both documents; ValueError if the row is not as published."""
    label, _, _, first, second = row.rstrip(b"\r\n").split(b"\t")
    if label not in (b"0", b"1", b"0.0", b"1.0") or not first.strip() or not second.strip():
        raise ValueError
    return [label[:1], first[:LONGEST], second[:LONGEST]]


def main(source: Path, out: Path) -> None:
    with new_folder(str(out)) as folder:
        for split, name in FILES.items():
            path, rows = source / name, 0
            if not path.exists():
                raise UserError(f"{path} does not exist; give the folder with {', '.join(FILES.values())}")
            files = [open(f"{folder}/{split}.{ending}", "wb") for ending in ("label", "input", "input1")]  # noqa: SIM115
            with path.open("rb") as table:
                for rows, row in enumerate(table, 1):
                    try:
                        cells = columns(row)
                    except ValueError:
                        raise UserError(
                            f"{path}: row {rows:,} is not a label 0.0 or 1.0, two names and two documents; get it again"
                        ) from None
                    for file, cell in zip(files, cells):
                        file.write(cell + b"\n")
            for file in files:
                file.close()
            if not rows or (split == "train" and rows != TRAINING):
                raise UserError(f"{path} has {rows:,} rows instead of those of the archive; get it again")


if __name__ == "__main__":
    run_program(__doc__, main)
