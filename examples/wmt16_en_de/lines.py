"""Lines of text, in and out, the way all steps here must see them: one reading of what a line and a space is."""

import sys
from typing import Iterable, Iterator

PROGRESS_EVERY = 500_000


def clean(stream: Iterable[str]) -> Iterator[str]:
    """The lines without their ends, every run of white space in them made one plain space.

    Web text holds carriage returns, no-break spaces and Unicode line separators. Some tools end a line or a word
    at these and some do not, and then the two languages fall out of step: so none gets past here.
    """
    try:
        for count, line in enumerate(stream, 1):
            yield " ".join(line.split())
            if count % PROGRESS_EVERY == 0:
                print(f"  {count:,} lines", file=sys.stderr, flush=True)
    except UnicodeDecodeError as error:
        sys.exit(f"error: the text is not UTF-8 ({error.reason}): convert it, with iconv for instance.")


def stdin() -> Iterator[str]:
    sys.stdin.reconfigure(encoding="utf-8", newline="\n")
    return clean(sys.stdin)


def write(lines: Iterable[str]) -> None:
    """To standard output."""
    sys.stdout.reconfigure(encoding="utf-8", newline="\n")
    sys.stdout.writelines(line + "\n" for line in lines)


def open_text(path: str, mode: str = "r"):
    return open(path, mode, encoding="utf-8", newline="\n")
