"""The command `mega-fairseq`: a folder for each large subcommand, and what they share."""

import contextlib
from typing import Iterator


class UserError(Exception):
    """What the user has to change, in one sentence with the remedy; the command prints it and exits with code 1."""


@contextlib.contextmanager
def errors_of(path: str) -> Iterator[None]:
    """Let a UserError begin with the file that it is about."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{path} {error}") from None
