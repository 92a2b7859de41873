"""Silence of the libraries."""

import contextlib
import logging
from typing import Iterator


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """fairseq lets every logger of a process speak, from debugging on."""
    logging.disable(logging.INFO)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
