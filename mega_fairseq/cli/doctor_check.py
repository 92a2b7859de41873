"""What a check of `mega-fairseq doctor` is, and how it becomes a row."""

from typing import Callable, Iterable, List, NamedTuple, Sequence, Set

LONGEST = 120  # letters of an error


class Trouble(Exception):
    """It does not work: what was found, and the remedy where the check's own is not the right one."""

    def __init__(self, found: str, remedy: str = ""):
        super().__init__(found)
        self.remedy = remedy


class Limit(Trouble):
    """It works, but not for everything, or not as we know it."""


class Check(NamedTuple):
    thing: str
    look: Callable[[], str]  # says what was found where that works, and raises anything where it does not
    remedy: str
    needed: bool = False  # nothing is trained or evaluated without it
    after: Sequence[str] = ()  # other things, without which this one cannot be tried


class Row(NamedTuple):
    mark: str  # ok, note, or no: training or evaluating cannot work
    thing: str
    found: str
    remedy: str


def examine(checks: Iterable[Check]) -> List[Row]:
    """A row for each check but those that had to come after something that does not work: that has the row."""
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
        except (Exception, SystemExit) as error:  # whatever a broken package raises
            remedy = error.remedy if isinstance(error, Trouble) else ""
            rows.append(Row("no" if check.needed else "note", check.thing, said(error), remedy or check.remedy))
            failed.add(check.thing)
    return rows


def said(error: BaseException) -> str:
    """The first line of an error, after its kind where that says more."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    line = lines[0] if lines else ""
    if not isinstance(error, (Trouble, ModuleNotFoundError)):
        line = f"{type(error).__name__}: {line}" if line else type(error).__name__
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 3]}..."
