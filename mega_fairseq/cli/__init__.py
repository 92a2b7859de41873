"""The command `mega-fairseq`: a folder for each large subcommand, and shared code."""

import contextlib
import os
import traceback
from typing import Iterator

import mega_fairseq


class UserError(Exception):
    """An error of the user: one sentence with its remedy. `main` prints it and returns 1."""


def is_for_user(error: Exception) -> bool:
    """Whether to print an error as a sentence: a UserError, or a ValueError that a `raise` of this package says.

    Other ValueErrors, such as those of int() and numpy, are bugs, or errors that need another sentence.
    """
    if not isinstance(error, ValueError):
        return isinstance(error, UserError)
    last = traceback.extract_tb(error.__traceback__)[-1]
    return last.filename.startswith(os.path.dirname(mega_fairseq.__file__)) and (last.line or "").startswith("raise ")


@contextlib.contextmanager
def errors_of(path: str) -> Iterator[None]:
    """Put `path` in front of the message of a UserError."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{path or repr(path)} {error}") from None
