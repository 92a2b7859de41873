"""`mega-fairseq doctor`: what will and will not work here, and the remedy for each thing that will not."""

import argparse
import contextlib
import logging
import os
import sys
import warnings
from typing import Iterator, Sequence

from mega_fairseq.cli import doctor_fairseq, doctor_machine, doctor_packages
from mega_fairseq.cli.doctor_check import Row, examine

TITLES = Row("", "thing", "found", "remedy")


def run(arguments: argparse.Namespace) -> None:
    with _quiet():
        rows = examine([*doctor_packages.CHECKS, *doctor_fairseq.CHECKS, *doctor_machine.CHECKS])
    rows = [Row(*map(_printable, row)) for row in rows]
    print(f"{table(rows)}\n{verdict(rows)}\n", end="")  # at once: whoever reads may stop after some lines
    if any(row.mark == "no" for row in rows):
        sys.exit(1)


def table(rows: Sequence[Row]) -> str:
    """One line a row; what has no remedy may be longer than its column."""
    things = max(len(row.thing) for row in rows)
    founds = max(len(row.found) for row in [TITLES, *rows] if row.remedy)
    lines = (f"{row.mark:4}  {row.thing:{things}}  {row.found:{founds}}  {row.remedy}" for row in [TITLES, *rows])
    return "\n".join(line.rstrip() for line in lines)


def verdict(rows: Sequence[Row]) -> str:
    for row in rows:
        if row.mark == "no":
            first = f"begin with {row.thing}: {row.remedy}; then call this again."
            return f"Training and evaluating cannot work here; {first}"
    return "Training and evaluating work here; each note says what does not, and what to do where you want it."


def _printable(text: str) -> str:
    """On one line, and in letters that standard output can write."""
    encoding = getattr(sys.stdout, "encoding", None) or "ascii"
    return " ".join(text.split()).encode(encoding, "backslashreplace").decode(encoding)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Nothing that a package says when it is imported or tried comes between the rows."""
    standard = os.dup(1)  # C++ writes to the descriptor itself
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        logging.disable(logging.CRITICAL)
        try:
            with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        finally:
            logging.disable(logging.NOTSET)
            os.dup2(standard, 1)
            os.close(standard)
