"""`mega-fairseq doctor`: check the environment."""

from typing import Callable, NamedTuple


class Problem(Exception):
    """What a failed check found, and a remedy if that of the check does not apply."""

    def __init__(self, found: str, remedy: str = ""):
        super().__init__(found)
        self.remedy = remedy


class Limit(Problem):
    """A restriction, or a version that was not tested with this package."""


class Check(NamedTuple):
    name: str
    look: Callable[[], str]  # returns what was found; any exception is a failure
    remedy: str
    needed: bool = False  # training and evaluation need it
