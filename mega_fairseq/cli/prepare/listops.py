"""`mega-fairseq prepare listops`: nested operations on digits, whose value is the label (Long Range Arena).

A node at depth 10 is a digit; at any other depth it is a digit with probability 3/4, else an operator with 2 to 10
arguments, all uniform. The root has depth 1. Trees are drawn until their number of symbols is in the given range:
with the default range one of twelve is kept. All time goes into drawing symbols, about a microsecond each; a tree is
given up as soon as it is too long.
"""

import argparse
import hashlib
from functools import partial
from itertools import islice
from random import Random
from typing import Callable, Dict, Iterable, Iterator, List, NamedTuple, Optional

from mega_fairseq.cli import UserError
from mega_fairseq.cli.prepare.folder import MOST, SPLITS, Folder, column

DEEPEST = 10
PART = 500  # examples
TRIES = 20_000  # trees for an example
LEAST = 4  # symbols of an operator with two digits

OPERATORS: Dict[str, Callable[[List[int]], int]] = {
    "[MIN": min,
    "[MAX": max,
    "[MED": lambda values: median(values),
    "[SM": lambda values: sum(values) % 10,
}
NAMES = list(OPERATORS)
DIGITS = [str(digit) for digit in range(10)]


def median(values: List[int]) -> int:
    """The mean of the two middle values, rounded down."""
    ordered = sorted(values)
    return (ordered[(len(values) - 1) // 2] + ordered[len(values) // 2]) // 2


def value(symbols: Iterable[str]) -> int:
    """The value of an expression; LookupError or ValueError if the symbols are not one."""
    operators: List[str] = []
    values: List[List[int]] = [[]]
    for symbol in symbols:
        if symbol in OPERATORS:
            operators.append(symbol)
            values.append([])
        elif symbol == "]":
            arguments = values.pop()
            if len(arguments) < 2:
                raise ValueError
            values[-1].append(OPERATORS[operators.pop()](arguments))
        else:
            values[-1].append(DIGITS.index(symbol))
    ((result,),) = values
    return result


class Tree(NamedTuple):
    symbols: List[str]
    value: int


class _Open(NamedTuple):
    """An operator whose arguments are being drawn."""

    name: str
    arguments: int
    values: List[int]


def tree(random: Callable[[], float], longest: int) -> Optional[Tree]:
    """A random tree, or None if it has more symbols than `longest`."""
    symbols: List[str] = []
    above: List[_Open] = []
    while len(symbols) + len(above) < longest:
        cell = int(1440 * random())  # 1,080 cells for digits, and 10 for each operator and number of arguments
        if cell >= 1080 and len(above) < DEEPEST - 1:
            operator, arguments = divmod(cell // 10 - 108, 9)
            symbols.append(NAMES[operator])
            above.append(_Open(NAMES[operator], arguments + 2, []))
            continue
        value = cell % 10
        symbols.append(DIGITS[value])
        while above:
            above[-1].values.append(value)
            if len(above[-1].values) < above[-1].arguments:
                break
            name, _, values = above.pop()
            symbols.append("]")
            value = OPERATORS[name](values)
        else:
            return Tree(symbols, value)
    return None


def make_part(seed: int, shortest: int, longest: int, number: int) -> bytes:
    """A part of the data: lines of value, tab and symbols."""
    random, lines = Random(f"listops {seed} {number}").random, []
    while len(lines) < PART:
        lines.append(_example(random, shortest, longest))
    return "".join(lines).encode()


def _example(random: Callable[[], float], shortest: int, longest: int) -> str:
    for _ in range(TRIES):
        found = tree(random, longest)
        if found is not None and len(found.symbols) >= shortest:
            return f"{found.value}\t{' '.join(found.symbols)}\n"
    raise UserError(
        f"none of {TRIES:,} trees had {shortest} to {longest} symbols; give another --shortest or a larger --longest"
    )


def settings(arguments: argparse.Namespace) -> Dict[str, int]:
    for split in SPLITS:
        if not 1 <= getattr(arguments, split) <= MOST:
            raise UserError(f"--{split} is {getattr(arguments, split)}; give a whole number from 1 to {MOST:,}")
    shortest, longest = arguments.shortest, arguments.longest
    if not LEAST <= shortest <= longest:
        raise UserError(f"--shortest is {shortest} and --longest {longest}; give {LEAST} <= shortest <= longest")
    _example(Random("listops").random, shortest, longest)  # refuses a range that trees hardly ever have
    return {name: getattr(arguments, name) for name in (*SPLITS, "shortest", "longest", "seed")}


def prepare(arguments: argparse.Namespace, folder: Folder) -> None:
    sizes = {split: getattr(arguments, split) for split in SPLITS}
    wanted = sum(sizes.values())
    make = partial(make_part, arguments.seed, arguments.shortest, arguments.longest)
    parts, found = _parts(wanted), 0
    while True:
        folder.make(make, range(parts), arguments.workers, PART)
        before, found = found, sum(1 for _ in distinct(folder.lines()))
        if found >= wanted:
            break
        if found - before < PART // 10:
            folder.discard()
            raise UserError(
                f"only {found:,} different trees of {arguments.shortest} to {arguments.longest} symbols were found; "
                "give fewer examples or a larger --longest"
            )
        parts += _parts(wanted - found)
    files: Dict[str, Iterable[bytes]] = {}
    start = 0
    for split, size in sizes.items():
        for number, name in enumerate(("label", "input")):
            files[f"{split}.{name}"] = column(islice(distinct(folder.lines()), start, start + size), number)
        start += size
    folder.finish(files, sizes)


def _parts(examples: int) -> int:
    return -(-examples // PART)


def distinct(lines: Iterable[bytes]) -> Iterator[bytes]:
    """The lines without repetitions."""
    seen = set()
    for line in lines:
        digest = hashlib.blake2b(line, digest_size=16).digest()
        if digest not in seen:
            seen.add(digest)
            yield line
