"""The command `mega-fairseq`: a folder for each large subcommand, and shared code."""

import contextlib
from typing import Iterator


class UserError(Exception):
    """An error of the user: one sentence with its remedy. `main` prints it, like those of tasks, and returns 1."""


@contextlib.contextmanager
def errors_of(path: str) -> Iterator[None]:
    """Put `path` in front of the message of a UserError."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{path or repr(path)} {error}") from None
