"""The tables of the Long Range Arena: .tsv files, which workers read in pieces of equal size."""

import argparse
import os
from functools import partial
from itertools import accumulate, takewhile
from typing import Callable, Dict, Iterable, Iterator, List, NamedTuple, Sequence

from mega_fairseq.cli import UserError
from mega_fairseq.cli.prepare.folder import SPLITS, Folder, column

PIECE = 8 << 20  # bytes


class Table(NamedTuple):
    """Three files of a folder, and what becomes of a row."""

    files: Sequence[str]  # train, valid, test
    header: bytes
    rows: Sequence[int]  # of each file; 0: any number
    columns: Sequence[str]  # endings of the files to write
    convert: Callable[[List[bytes]], Iterable[bytes]]  # from columns to columns; ValueError says what is wrong
    remedy: str


class Piece(NamedTuple):
    """The rows of a file that begin in this range of bytes."""

    path: str
    start: int
    stop: int
    time: int  # of the last change of the file


def prepare(arguments: argparse.Namespace, folder: Folder, table: Table) -> None:
    paths = [os.path.join(arguments.source, name) for name in table.files]
    pieces = [_pieces(table, path) for path in paths]
    make = partial(_make_part, table)
    folder.make(make, sum(pieces, []), arguments.workers, PIECE >> 20, unit="MB")
    files: Dict[str, Iterable[bytes]] = {}
    sizes, start = {}, 0
    for split, path, texts, rows in zip(SPLITS, paths, pieces, table.rows):
        parts = slice(start, start + len(texts))
        sizes[split] = sum(1 for _ in folder.lines(parts))
        if not sizes[split] or rows not in (0, sizes[split]):
            raise UserError(f"{path} has {sizes[split]:,} rows instead of {rows or 'some'}; {table.remedy}")
        for number, name in enumerate(table.columns):
            files[f"{split}.{name}"] = column(folder.lines(parts), number, len(table.columns))
        start += len(texts)
    folder.finish(files, sizes)


def _pieces(table: Table, path: str) -> List[Piece]:
    try:
        status = os.stat(path)
        with open(path, "rb") as file:
            header = file.readline() if table.header else b""
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); {table.remedy}") from None
    if header.rstrip(b"\r\n") != table.header:
        raise UserError(f"{path} does not begin with {table.header.decode()!r}; {table.remedy}")
    starts = range(0, status.st_size, PIECE)
    return [Piece(path, max(start, len(header)), start + PIECE, status.st_mtime_ns) for start in starts]


def _make_part(table: Table, piece: Piece) -> bytes:
    return b"".join(_rows(table, piece))


def _rows(table: Table, piece: Piece) -> Iterator[bytes]:
    with open(piece.path, "rb") as file:
        if piece.start:
            file.seek(piece.start - 1)
            file.readline()  # the row before
        while file.tell() < piece.stop:
            start, line = file.tell(), file.readline()
            if not line:
                return
            try:
                yield b"\t".join(table.convert(line.rstrip(b"\r\n").split(b"\t"))) + b"\n"
            except ValueError as error:
                number = _row_number(piece.path, start)
                raise UserError(f"{piece.path}: row {number:,} {error}; {table.remedy}") from None


def _row_number(path: str, start: int) -> int:
    """The number of the row that begins at this byte, from 1."""
    with open(path, "rb") as file:
        return 1 + sum(1 for _ in takewhile(lambda end: end <= start, accumulate(map(len, file))))
