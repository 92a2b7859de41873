"""The checks of `mega-fairseq doctor` and their results."""

from typing import Callable, Iterable, List, NamedTuple, Sequence, Set

LONGEST = 120  # characters of an error


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
    after: Sequence[str] = ()  # other things that this check needs


class Row(NamedTuple):
    mark: str  # ok, note, or no: training or evaluation cannot work
    thing: str
    found: str
    remedy: str


def examine(checks: Iterable[Check]) -> List[Row]:
    """Run the checks in order; skip those that need a thing that does not work."""
    rows: List[Row] = []
    failed: Set[str] = set()
    for check in checks:
        if failed.intersection(check.after):
            failed.add(check.thing)
            continue
        try:
            rows.append(Row("ok", check.thing, check.look(), ""))
        except Limit as limit:
            rows.append(Row("note", check.thing, str(limit), limit.remedy or check.remedy))
        except (Exception, SystemExit) as error:  # a broken package may raise anything
            remedy = error.remedy if isinstance(error, Problem) else ""
            rows.append(Row("no" if check.needed else "note", check.thing, summary(error), remedy or check.remedy))
            failed.add(check.thing)
    return rows


def summary(error: BaseException) -> str:
    """The first line of an error, with its type where that helps."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    line = lines[0] if lines else ""
    if not isinstance(error, (Problem, ModuleNotFoundError)):
        line = f"{type(error).__name__}: {line}" if line else type(error).__name__
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 3]}..."
