"""`mega-fairseq doctor`: what works in this environment."""

from typing import Callable, NamedTuple


class Problem(Exception):
    """Something does not work: what was found, and a remedy if the check's own does not apply."""

    def __init__(self, found: str, remedy: str = ""):
        super().__init__(found)
        self.remedy = remedy


class Limit(Problem):
    """Something works with restrictions, or was not tested with this package."""


class Check(NamedTuple):
    thing: str
    look: Callable[[], str]  # returns what was found; raises any exception if the thing does not work
    remedy: str
    needed: bool = False  # training and evaluation need it
