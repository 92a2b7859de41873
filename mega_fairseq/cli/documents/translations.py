"""`mega-fairseq documents split`: the lines of translated windows, from the output of fairseq-generate."""

import argparse
import math
import re
from bisect import bisect_left
from itertools import accumulate, islice, product
from typing import Dict, Iterable, List, NamedTuple, Tuple

from mega_fairseq.cli import UserError
from mega_fairseq.cli.output import check_prefix, write, write_json
from mega_fairseq.documents import document_borders, read_lines, separator_symbol, split_window

KEYS = "source_lines", "translated_lines"  # of each window, in PREFIX.json
# Lines of a source and of its translation that belong together, and how often (Gale and Church, 1993, table 5).
MATCHES = {(0, 1): 0.0099, (1, 0): 0.0099, (1, 2): 0.089, (2, 1): 0.089, (1, 1): 0.89}
VARIANCE = 6.8  # of the difference of lengths, for each character
SHOWN = 10  # windows in a message


class Window(NamedTuple):
    """Consecutive lines of a document, and the lines of their translation."""

    source: List[str]
    translation: List[str]

    @property
    def counts(self) -> Tuple[int, int]:
        return len(self.source), len(self.translation)


def run(arguments: argparse.Namespace) -> None:
    prefix = arguments.out
    check_prefix(prefix, (".json", ".pieces"), KEYS[0])
    windows = read_windows(arguments.generated, separator_symbol(arguments.separator))
    check_borders(windows, arguments.generated, arguments.docs)
    equal = [window for window in windows if len(set(window.counts)) == 1]
    ratio = total(window.translation for window in equal) / (total(window.source for window in equal) or 1) or 1.0
    lines: List[str] = []
    repaired, doubtful = [], []  # numbers of windows
    for number, window in enumerate(windows):
        if len(set(window.counts)) == 1:
            lines += window.translation
            if is_doubtful(window, ratio):
                doubtful.append(str(number))
        else:
            lines += align(window, ratio)
            repaired.append(str(number))
    write_json(prefix, dict(zip(KEYS, zip(*(window.counts for window in windows)))))  # first: it marks both as ours
    write(f"{prefix}.pieces", "".join(f"{line}\n" for line in lines).encode())
    print(f"{len(windows):,} windows, {len(lines):,} lines; wrote {prefix}.pieces and {prefix}.json")
    for names, about in (
        (repaired, "windows had another number of lines than their source and were aligned by length"),
        (doubtful, "windows may be shifted by a line: half of the lengths do not fit those of the source"),
    ):
        if names:
            print(f"{len(names):,} {about}: {', '.join(names[:SHOWN])}{', ...' * (len(names) > SHOWN)}")


# ------------------------------------------------------------------------------------------- reading


def read_windows(path: str, separator: str) -> List[Window]:
    """The source and the best translation of each window, in the order of their numbers."""
    sides: Dict[str, Dict[int, List[str]]] = {"S": {}, "H": {}, "P": {}}
    for line in read_lines(path):
        found = re.match(r"([SHP])-(\d+)(?: |$)(.*)", line)
        if not found:
            continue
        kind, number, text = found[1], int(found[2]), found[3]
        if kind == "S" and number in sides["S"]:
            raise UserError(f"window {number:,} occurs twice in {path}; give the output of one run of fairseq-generate")
        if kind == "H":
            text = text.partition(" ")[2]  # after the score
        sides[kind].setdefault(number, split_window(text, separator))
    sources, translations = sides["S"], sides["H"]
    for number in range(max(sources, default=0) + 1):
        if not all(number in side for side in sides.values()):  # without the P that follows, H may be incomplete
            raise UserError(
                f"window {number:,} is missing or incomplete in {path}; give the whole output of fairseq-generate, "
                "without --quiet and with --required-batch-size-multiple 1"
            )
    return [Window(sources[number], translations[number]) for number in sorted(sources)]


def check_borders(windows: List[Window], path: str, docs: str) -> None:
    """Check that the windows have the lines of `docs`, and that none has lines of two documents."""
    ids = read_lines(docs)
    ends = list(accumulate(len(window.source) for window in windows))
    if ends[-1] != len(ids):
        raise UserError(
            f"the sources of {path} have {ends[-1]:,} lines and {docs} has {len(ids):,}; give the ids of the split "
            "that was translated, and the output of fairseq-generate with --required-batch-size-multiple 1 and the "
            "--separator of the task, without --remove-bpe, --bpe and --tokenizer"
        )
    for border in document_borders(ids, docs)[1:]:
        number = bisect_left(ends, border)
        if ends[number] != border:
            raise UserError(
                f"window {number:,} of {path} has lines of two documents, {ids[border - 1]!r} and {ids[border]!r} of "
                f"{docs}; give the ids of the split that was translated"
            )


# ------------------------------------------------------------------------------------------- alignment


def length(line: str) -> int:
    """Characters, without blanks and marks of subwords."""
    return len(re.sub("@@( |$)|[ \u2581]", "", line))


def total(texts: Iterable[List[str]]) -> int:
    return sum(length(line) for lines in texts for line in lines)


def is_doubtful(window: Window, ratio: float) -> bool:
    """Whether at least half of several lines have less than a third of the expected length, or more than threefold."""
    pairs = [(ratio * length(source), length(translation)) for source, translation in zip(*window)]
    outliers = sum(not expected / 3 <= found <= 3 * expected for expected, found in pairs)
    return len(pairs) > 1 and 2 * outliers >= len(pairs)


def align(window: Window, ratio: float) -> List[str]:
    """One translated line for each line of the source, with all the text in its order, by dynamic programming.

    `ratio` is the expected length of a translation relative to its source. Unlike Gale and Church's, omitted and added
    lines cost the same whatever their length, and two lines match one only if either alone would fit it worse. Of
    omitted and doubled lines in Bible chapters, that finds the place of 50 to 67% instead of 17 to 24%.
    """
    lines = [line for line in window.translation if line]
    expected, found = [ratio * length(line) for line in window.source], [length(line) for line in lines]
    best: Dict[Tuple[int, int], Tuple[int, int, int]] = {(0, 0): (0, 0, 0)}  # the cost, and the last match
    for i, j in islice(product(range(len(expected) + 1), range(len(found) + 1)), 1, None):
        options = []
        for (m, n), share in MATCHES.items():
            if (i - m, j - n) not in best:
                continue
            sources, targets = expected[i - m : i], found[j - n : j]
            cost = cost_of(sum(sources), sum(targets)) if m and n else 0
            if m + n < 3 or cost <= min(cost_of(*pair) for pair in product(sources, targets)):
                options.append((best[i - m, j - n][0] + cost + round(-1000 * math.log(share)), m, n))
        best[i, j] = min(options)
    aligned: List[str] = []
    text: List[str] = []
    while i or j:
        _, m, n = best[i, j]
        i, j = i - m, j - n
        text = lines[j : j + n] + text
        if m:  # otherwise the text belongs to the line before
            aligned = [" ".join(text), *[""] * (m - 1), *aligned]
            text = []
    return [" ".join([*text, aligned[0]]).strip(), *aligned[1:]]


def cost_of(expected: float, found: float) -> int:
    """How unlikely two lengths belong together: -log p in thousandths, as integers for exact ties of sums."""
    deviation = abs(found - expected) / math.sqrt(VARIANCE * max((expected + found) / 2, 1))
    return round(-1000 * math.log(max(math.erfc(deviation / math.sqrt(2)), 1e-300)))
