"""Read and write lines of text. All steps share one definition of a line and of white space."""

import sys
from typing import Iterable, Iterator

PROGRESS_EVERY = 500_000


def clean(stream: Iterable[str]) -> Iterator[str]:
    """Yield the lines without line ends, with every run of white space replaced by one space.

    Web text contains carriage returns, no-break spaces and Unicode line separators. Tools disagree about whether these
    end a line or a word, which would misalign the two languages, so they are removed here.
    """
    try:
        for count, line in enumerate(stream, 1):
            yield " ".join(line.split())
            if count % PROGRESS_EVERY == 0:
                print(f"  {count:,} lines", file=sys.stderr, flush=True)
    except UnicodeDecodeError as error:
        sys.exit(f"error: the text is not UTF-8 ({error.reason}): convert it, with iconv for instance.")


def stdin() -> Iterator[str]:
    sys.stdin.reconfigure(encoding="utf-8-sig", newline="\n")
    return clean(sys.stdin)


def write(lines: Iterable[str]) -> None:
    """Write lines to standard output."""
    sys.stdout.reconfigure(encoding="utf-8", newline="\n")
    sys.stdout.writelines(line + "\n" for line in lines)


def open_text(path: str, mode: str = "r"):
    return open(path, mode, encoding="utf-8-sig" if mode == "r" else "utf-8", newline="\n")  # without a BOM
