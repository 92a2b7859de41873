"""Runs `mega-fairseq prepare` and compares what it wrote."""

import os
import re
import signal
import statistics
from pathlib import Path
from typing import Any, Callable, Dict

from mega_fairseq.cli.prepare import pathfinder
from tests.helpers.commands import Running, fairseq


def prepare(*words: Any) -> str:
    return fairseq("mega-fairseq", "prepare", *words)


def contents(folder: Path) -> Dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def kill(fault: Callable[[], None], *words: Any) -> None:
    code, output = Running("mega-fairseq", "prepare", *words, fault=fault).wait()
    assert code == -signal.SIGKILL, output


def killed_in_the_third_part(seed: int, size: int, number: int) -> bytes:
    """In place of Pathfinder's `make_part`, in a worker."""
    if number == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return pathfinder.make_part(seed, size, number)


def within(found: float, expected: float, error: float, errors: float = 4) -> bool:
    """Whether a number lies within so many standard errors; at 4, one of 16,000 numbers is outside by chance."""
    return abs(found - expected) < errors * error


COMPUTE = {
    "MIN": min,
    "MAX": max,
    "MED": lambda values: int(statistics.median(values)),
    "SM": lambda values: sum(values) % 10,
}


def value(text: str) -> int:
    """The value of an expression: replaces innermost operations by theirs until a digit is left."""

    def computed(match: "re.Match[str]") -> str:
        return str(COMPUTE[match[1]](list(map(int, match[2].split()))))

    while len(text) > 1:
        text, replaced = re.subn(r"\[([A-Z]+)((?: \d){2,10}) \]", computed, text)
        assert replaced, "not an expression"
    return int(text)
