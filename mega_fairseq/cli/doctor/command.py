"""`mega-fairseq doctor`: check what works here and print the remedy for each thing that does not."""

import argparse
import sys
import warnings
from typing import Sequence

from mega_fairseq.cli.doctor import fairseq, machine, packages
from mega_fairseq.cli.doctor.check import Row, examine
from mega_fairseq.cli.output import quiet_output, table

TITLES = Row("", "thing", "found", "remedy")
CHECKS = [*packages.CHECKS, *fairseq.CHECKS, *machine.CHECKS]


def run(arguments: argparse.Namespace) -> None:
    with quiet_output(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = examine(CHECKS)
    rows = [Row(*map(_printable, row)) for row in rows]
    lines = table([TITLES, *(row if row.remedy else row[:-1] for row in rows)], left=len(TITLES))
    print(f"{lines}\n{verdict(rows)}\n", end="")  # in one write, in case the reader of a pipe stops early
    if any(row.mark == "no" for row in rows):
        sys.exit(1)


def verdict(rows: Sequence[Row]) -> str:
    for row in rows:
        if row.mark == "no":
            return (
                f"Training and evaluation cannot work here; begin with {row.thing}: {row.remedy}; then run this again."
            )
    return "Training and evaluation work here; each note names a restriction and its remedy."


def _printable(text: str) -> str:
    """On one line, in characters that standard output can encode."""
    encoding = getattr(sys.stdout, "encoding", None) or "ascii"
    return " ".join(text.split()).encode(encoding, "backslashreplace").decode(encoding)
