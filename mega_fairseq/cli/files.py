"""Files that are either whole or not there."""

import contextlib
import os

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
