"""Runs `mega-fairseq prepare` and compares what it wrote."""

import signal
from pathlib import Path
from typing import Any, Callable, Dict

from tests.commands import Running, fairseq


def prepare(*words: Any) -> str:
    return fairseq("mega-fairseq", "prepare", *words)


def contents(folder: Path) -> Dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def kill(fault: Callable[[], None], *words: Any) -> None:
    code, output = Running("mega-fairseq", "prepare", *words, fault=fault).wait()
    assert code == -signal.SIGKILL, output


def within(found: float, expected: float, error: float, errors: float = 4) -> bool:
    """Whether a number lies within so many standard errors; at 4, one of 16,000 numbers is outside by chance."""
    return abs(found - expected) < errors * error
