"""`mega-fairseq documents split`: the lines of translated windows, from the output of fairseq-generate."""

import argparse
import re
from bisect import bisect_left
from itertools import accumulate
from typing import Dict, List, NamedTuple

from mega_fairseq.cli import UserError
from mega_fairseq.cli.output import check_prefix, write, write_json
from mega_fairseq.documents import document_borders, read_lines, separator_symbol, split_window

KEYS = "source_lines", "translated_lines"  # of each window, in PREFIX.json
SHOWN = 10  # windows in a message


class Window(NamedTuple):
    """Consecutive lines of a document, and the lines of their translation."""

    source: List[str]
    translation: List[str]


def run(arguments: argparse.Namespace) -> None:
    prefix = arguments.out
    check_prefix(prefix, (".json", ".pieces"), KEYS[0])
    windows = read_windows(arguments.generated, separator_symbol(arguments.separator))
    check_borders(windows, arguments.generated, arguments.docs)
    counts = [(len(window.source), len(window.translation)) for window in windows]
    lines = [line for window in windows for line in fitted(window)]
    write_json(prefix, dict(zip(KEYS, zip(*counts))))  # first: it marks both as ours
    write(f"{prefix}.pieces", "".join(f"{line}\n" for line in lines).encode())
    print(f"{len(windows):,} windows, {len(lines):,} lines; wrote {prefix}.pieces and {prefix}.json")
    unequal = [str(number) for number, (source, translated) in enumerate(counts) if source != translated]
    if unequal:
        shown = f"{', '.join(unequal[:SHOWN])}{', ...' * (len(unequal) > SHOWN)}"
        print(f"{len(unequal):,} windows had another number of lines than their source: {shown}")


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


def fitted(window: Window) -> List[str]:
    """A translated line for each line of the source, with all the text: further lines join the last one."""
    last = len(window.source) - 1
    lines = [*window.translation[:last], " ".join(window.translation[last:])]
    return [*lines, *[""] * (len(window.source) - len(lines))]
