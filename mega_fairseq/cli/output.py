"""Print tables, write files, and suppress the output of other packages."""

import contextlib
import io
import json
import logging
import os
import sys
from typing import Any, Callable, Dict, Iterable, Iterator, List, Sequence, Union

from mega_fairseq.cli import UserError


def table(rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Align the first `left` columns to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    aligned = [
        [f"{cell:{'<' if i < left else '>'}{width}}" for i, (cell, width) in enumerate(zip(row, widths))]
        for row in rows
    ]
    return "\n".join("  ".join(row).rstrip() for row in aligned)


def write(path: str, content: Union[bytes, memoryview, Iterable[bytes]]) -> None:
    """Write the whole file or nothing: an existing `path` is replaced once the new file is completely written."""
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        with open(temporary, "wb") as file:
            file.writelines([content] if isinstance(content, (bytes, memoryview)) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise not_written(path, error) from None
    finally:
        with contextlib.suppress(OSError):
            os.remove(temporary)


def not_written(path: str, error: OSError) -> UserError:
    return UserError(f"{path} was not written ({error.strerror}); free some space, or choose another folder")


def write_json(prefix: str, content: Dict[str, Any]) -> None:
    write(f"{prefix}.json", (json.dumps(content, indent=1, allow_nan=False) + "\n").encode())


def plain(text: str) -> str:
    """Text of users in a figure: matplotlib reads what is between two $ as mathematics."""
    return text.replace("$", r"\$")


def write_figure(path: str, draw: Callable[[], Any]) -> List[str]:
    """Write a figure if matplotlib is installed, and return the paths of the written files."""
    try:
        figure = draw()
    except ImportError:
        print(f"{path} was not drawn without matplotlib; install it and run the same command again", file=sys.stderr)
        return []
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    write(path, buffer.getvalue())
    return [path]


def check_file(path: str) -> None:
    """Check in advance that a file can be written to `path`."""
    folder, name = os.path.split(path)
    if not path:
        raise UserError("the path of the output is empty; give the name of a file")
    if not name or os.path.isdir(path):
        raise UserError(f"{path} is a folder; give the name of a file")
    if folder and not os.path.isdir(folder):
        raise UserError(f"the folder {folder} of {name} does not exist; create it or choose another")


def check_prefix(prefix: str, endings: Sequence[str], key: str, force: bool = False) -> None:
    """Check in advance that PREFIX.* can be written, and that no unrelated file would be overwritten.

    Each PREFIX.json of the command itself contains `key`.
    """
    if not os.path.basename(prefix):
        raise UserError(f"--out is {prefix!r}; give the beginning of file names, such as {prefix}result")
    try:
        with open(f"{prefix}.json") as file:
            replaceable = key in json.load(file)
    except (OSError, RecursionError, TypeError, ValueError):
        replaceable = False
    for path in (prefix + ending for ending in endings):
        check_file(path)
        if os.path.lexists(path) and not force and not replaceable:
            raise UserError(f"{path} exists and was not written by this command; give another --out or remove the file")


@contextlib.contextmanager
def quiet_logging(level: int = logging.INFO) -> Iterator[None]:
    """Suppress log records up to `level`: importing fairseq lets every logger of the process print."""
    before = logging.root.manager.disable
    logging.disable(max(level, before))
    try:
        yield
    finally:
        logging.disable(before)


@contextlib.contextmanager
def quiet_output() -> Iterator[None]:
    """Suppress everything that other packages log or print, including C++ code that writes to stdout directly."""
    stdout = os.dup(1)
    with open(os.devnull, "w") as null:
        os.dup2(null.fileno(), 1)
        try:
            with contextlib.redirect_stdout(null), contextlib.redirect_stderr(null), quiet_logging(logging.CRITICAL):
                yield
        finally:
            os.dup2(stdout, 1)
            os.close(stdout)
