"""`mega-fairseq doctor`: check the environment and print a remedy for each problem."""

import argparse
import sys
import warnings
from typing import Iterable, List, NamedTuple

from mega_fairseq.cli.doctor import Check, Limit, Problem, machine, packages
from mega_fairseq.cli.output import quiet_output

LONGEST = 120  # characters of an error


class Row(NamedTuple):
    mark: str  # ok, note, or no: training or evaluation cannot work
    name: str
    found: str
    remedy: str = ""


def run(arguments: argparse.Namespace) -> None:
    sys.stdout.reconfigure(errors="backslashreplace")
    with quiet_output(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = examine(packages.CHECKS)
        if not any(row.mark == "no" for row in rows):
            rows += examine(machine.CHECKS)
    lines = [f"{row.mark:4}  {row.name:13}  {'; '.join(filter(None, row[2:]))}" for row in rows]
    broken = [row for row in rows if row.mark == "no"]
    if broken:
        lines.append(
            f"Training and evaluation cannot work here; begin with {broken[0].name}: {broken[0].remedy}; "
            "then run this again."
        )
    else:
        lines.append("Training and evaluation work here; each note is a restriction with its remedy.")
    print("\n".join(lines))
    if broken:
        sys.exit(1)


def examine(checks: Iterable[Check]) -> List[Row]:
    rows = []
    for check in checks:
        try:
            rows.append(Row("ok", check.name, check.look()))
        except (Exception, SystemExit) as error:  # a broken package may raise anything
            mark = "no" if check.needed and not isinstance(error, Limit) else "note"
            rows.append(Row(mark, check.name, _summary(error), getattr(error, "remedy", "") or check.remedy))
    return rows


def _summary(error: BaseException) -> str:
    """The first line of an error, with its type if the line alone may be unclear."""
    line = next((" ".join(line.split()) for line in str(error).splitlines() if line.strip()), "")
    if not isinstance(error, (Problem, ModuleNotFoundError)):
        line = f"{type(error).__name__}: {line}" if line else type(error).__name__
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 3]}..."
