"""ListOps: nested operations on digits, whose value is the label. Generates them, or checks the published tables.

    expressions.py OUT [--train N] [--valid N] [--test N] [--shortest N] [--longest N] [--seed N]
    expressions.py OUT --source FOLDER      with basic_train.tsv, basic_val.tsv and basic_test.tsv

A node at depth 10 is a digit; at any other depth it is a digit with probability 3/4, else an operator with 2 to 10
arguments, all uniform. The root has depth 1. Trees are drawn until their number of symbols is in the given range: with
the default range one of twelve is kept, and 100,000 expressions take two CPU minutes.
"""

import argparse
import os
import sys
from itertools import count, islice
from random import Random
from typing import Callable, Dict, Iterable, Iterator, List, NamedTuple, Optional, Tuple

from tqdm import tqdm

from mega_fairseq.cli import UserError
from mega_fairseq.cli.prepare import SPLITS, new_folder, write_lines

DEEPEST = 10
SEEDED = 500  # expressions from one random generator
TRIES = 20_000  # trees for an expression
PUBLISHED = {"train": ("basic_train.tsv", 96_000), "valid": ("basic_val.tsv", 2_000), "test": ("basic_test.tsv", 2_000)}
DIGITS = [str(digit) for digit in range(10)]
OPERATORS: Dict[str, Callable[[List[int]], int]] = {
    "[MIN": min,
    "[MAX": max,
    "[MED": lambda values: median(values),
    "[SM": lambda values: sum(values) % 10,
}
Example = Tuple[str, str]  # expression and value


def median(values: List[int]) -> int:
    """The mean of the two middle values, rounded down."""
    ordered = sorted(values)
    return (ordered[(len(values) - 1) // 2] + ordered[len(values) // 2]) // 2


# ---------------------------------------------------------------------------------------- generating


class Tree(NamedTuple):
    symbols: List[str]
    value: int


class OpenOperator(NamedTuple):
    """An operator whose arguments are being drawn."""

    name: str
    arguments: int
    values: List[int]


def tree(random: Callable[[], float], longest: int) -> Optional[Tree]:
    """A random tree, or None if it has more symbols than `longest`."""
    symbols: List[str] = []
    above: List[OpenOperator] = []
    names = list(OPERATORS)
    while len(symbols) + len(above) < longest:
        cell = int(1440 * random())  # 1,080 cells for digits, and 10 for each operator and number of arguments
        if cell >= 1080 and len(above) < DEEPEST - 1:
            operator, arguments = divmod(cell // 10 - 108, 9)
            symbols.append(names[operator])
            above.append(OpenOperator(names[operator], arguments + 2, []))
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


def expressions(seed: int, shortest: int, longest: int) -> Iterator[Example]:
    """Different expressions without end; stops with an error where there are no more."""
    lines = set()
    for number in count():
        random, before = Random(f"listops {seed} {number}").random, len(lines)
        for _ in range(SEEDED):
            drawn = (tree(random, longest) for _ in range(TRIES))
            chosen = next((each for each in drawn if each and len(each.symbols) >= shortest), None)
            if chosen is None:
                raise UserError(f"trees of {shortest} to {longest} symbols are too rare; give another range")
            line = " ".join(chosen.symbols)
            if line not in lines:
                lines.add(line)
                yield line, str(chosen.value)
        if len(lines) - before < SEEDED // 10:
            raise UserError(
                f"there are hardly more than {len(lines):,} trees of {shortest} to {longest} symbols; give fewer "
                "examples or a larger --longest"
            )


# -------------------------------------------------------------------------------- published tables


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


def published(path: str, rows: int) -> List[Example]:
    """The expressions of a table, without parentheses; each value is computed again."""
    if not os.path.exists(path):
        raise UserError(f"{path} does not exist; give the folder with the published tables")
    with open(path, encoding="latin1", newline="") as file:
        lines = [line.rstrip("\r\n") for line in file]
    if lines[:1] != ["Source\tTarget"] or len(lines) != rows + 1:
        raise UserError(f"{path} does not have a header and {rows:,} rows; get it again")
    examples = []
    for number, line in enumerate(lines[1:], 2):
        source, _, label = line.partition("\t")
        symbols = [symbol for symbol in source.split() if symbol not in ("(", ")")]
        try:
            right = label == str(value(symbols))
        except (LookupError, ValueError):
            right = False
        if not right:
            raise UserError(f"{path}: row {number:,} is not an expression with its value; get it again")
        examples.append((" ".join(symbols), label))
    return examples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", help="a new folder")
    parser.add_argument("--source", metavar="FOLDER", help="the published tables")
    defaults = {"train": 96_000, "valid": 2_000, "test": 2_000, "shortest": 501, "longest": 1999, "seed": 1}
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help="(default: %(default)s)")
    args = parser.parse_args()
    sizes = {split: getattr(args, split) for split in SPLITS}
    if args.source is None and (min(sizes.values()) < 1 or not 4 <= args.shortest <= args.longest):
        raise UserError(f"--train, --valid, --test are {sizes}; give at least 1, and 4 <= --shortest <= --longest")
    drawn = expressions(args.seed, args.shortest, args.longest)
    drawn = iter(tqdm(drawn, total=sum(sizes.values()), unit="example", disable=None))
    with new_folder(args.out) as folder:
        for split, size in sizes.items():
            if args.source is None:
                examples = list(islice(drawn, size))
            else:
                name, rows = PUBLISHED[split]
                examples = published(os.path.join(args.source, name), rows)
            for ending, column in zip(("input", "label"), zip(*examples)):
                write_lines(os.path.join(folder, f"{split}.{ending}"), column)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}.")
