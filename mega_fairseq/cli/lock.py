"""Let processes that change the same files wait for each other."""

import contextlib
import fcntl
import os
from typing import Iterator

from mega_fairseq.cli.output import not_written


@contextlib.contextmanager
def locked(path: str) -> Iterator[None]:
    """Wait until no other process holds this lock, and hold it; one that is killed leaves the file, but no lock.

    The file at `path` exists only meanwhile. Nothing is locked on network file systems without locks.
    """
    while True:
        try:
            file = open(path, "a")  # noqa: SIM115 - closed below
        except OSError as error:
            raise not_written(path, error) from None
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                break
        file.close()  # of the process before, which has removed it
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.remove(path)
        file.close()
