"""Tables that commands print, files that they write, and third-party output that they suppress."""

import contextlib
import json
import logging
import os
import sys
from typing import Callable, Iterator, Sequence

from mega_fairseq.cli import UserError


def table(rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Align the first `left` columns to the left and the others to the right.

    A row may have fewer cells than the first, and its last cell may then be longer than the column.
    """
    columns = len(rows[0])
    widths = [max(len(row[i]) for row in rows if i < len(row) - (len(row) < columns)) for i in range(columns)]
    lines = []
    for row in rows:
        start = [cell.ljust(width) for cell, width in zip(row[:left], widths)]
        lines.append(
            "  ".join([*start, *(cell.rjust(width) for cell, width in zip(row[left:], widths[left:]))]).rstrip()
        )
    return "\n".join(lines)


def write(path: str, content: bytes) -> None:
    """Write the whole file or nothing: an existing `path` is replaced once the new file is complete on the disk."""
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        try:
            with open(temporary, "xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.remove(temporary)
            raise
    except OSError as error:
        raise UserError(
            f"{path} was not written ({error.strerror}); free some space or choose another folder"
        ) from None


def write_figure(path: str, draw: Callable[[], bytes]) -> bool:
    """Write a figure where matplotlib is installed; the numbers are on the disk already."""
    try:
        write(path, draw())
    except ImportError:
        print(f"{path} was not drawn without matplotlib; install it and run the same command again", file=sys.stderr)
        return False
    return True


def check_prefix(prefix: str, endings: Sequence[str], key: str, force: bool = False) -> None:
    """Check before any work that PREFIX.* can be written and that no file of anything else is overwritten.

    `key` is in each PREFIX.json that the command itself wrote.
    """
    folder, name = os.path.split(prefix)
    if not name:
        raise UserError(f"--out is {prefix!r}; give the beginning of file names, as in {prefix}result")
    if folder and not os.path.isdir(folder):
        raise UserError(f"the folder {folder} of --out does not exist; create it or choose another")
    for path in (prefix + ending for ending in endings):
        if os.path.isdir(path):
            raise UserError(f"{path} is a folder; give another --out")
        if os.path.lexists(path) and not force and not _has_key(f"{prefix}.json", key):
            raise UserError(f"{path} exists and this command did not write it; give another --out or remove the file")


def _has_key(path: str, key: str) -> bool:
    try:
        with open(path) as file:
            content = json.load(file)
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and key in content


@contextlib.contextmanager
def quiet_logging(level: int = logging.INFO) -> Iterator[None]:
    """Suppress log records up to `level`: importing fairseq lets every logger of the process print."""
    logging.disable(level)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


@contextlib.contextmanager
def quiet_output() -> Iterator[None]:
    """Suppress everything that other packages log or print, including C++ code that writes to the descriptor."""
    stdout = os.dup(1)
    with open(os.devnull, "w") as null:
        os.dup2(null.fileno(), 1)
        try:
            with contextlib.redirect_stdout(null), contextlib.redirect_stderr(null), quiet_logging(logging.CRITICAL):
                yield
        finally:
            os.dup2(stdout, 1)
            os.close(stdout)
