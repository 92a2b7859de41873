"""Files that are either whole or not there, all with names that start alike: PREFIX.json, PREFIX.png, ..."""

import contextlib
import os
import sys
from typing import Callable

from mega_fairseq.cli.refusal import Refusal


def write(path: str, content: bytes) -> None:
    """All or nothing: `path` is untouched until the new file lies complete on the disk beside it."""
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
        raise Refusal(f"{path} was not written ({error.strerror}); make room, or choose another folder") from None


def check_folder(prefix: str, example: str) -> None:
    """Before any work: whether there is a place for PREFIX.*."""
    folder, name = os.path.split(prefix)
    if not name:
        raise Refusal(f"--out is {prefix!r}; give what the files' names start with, as in {prefix}{example}")
    if folder and not os.path.isdir(folder):
        raise Refusal(f"the folder {folder} of --out does not exist; create it, or choose another")


def write_figure(path: str, figure: Callable[[], bytes]) -> None:
    """What is drawn, or what to do where there is nothing to draw with: the numbers are on the disk already."""
    try:
        write(path, figure())
    except ImportError:
        print(f"{path} was not drawn without matplotlib; install it and call the same command again", file=sys.stderr)
