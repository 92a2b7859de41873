"""The results of a sweep: PREFIX.json, from which an interrupted sweep resumes, and PREFIX.csv with the same points."""

import contextlib
import csv
import io
import json
import math
import os
from typing import Any, Dict, List, NamedTuple, Optional, Tuple, get_args, get_type_hints

from mega_fairseq.cli import UserError
from mega_fairseq.cli.output import locked, write, write_json

OTHER = {"checkpoint": "another checkpoint", "data": "other data or another subset"}


class Point(NamedTuple):
    """One evaluation of a split: the attention's chunk size, and how the split was cut into streams."""

    chunk: int  # -1: none
    cut: str  # splits:K, size:N, documents:line or documents:blank
    streams: int
    context: int  # tokens of the longest stream
    tokens: int
    bits: Optional[float] = None  # loss to base 2 per token; None if the point could not be evaluated
    perplexity: Optional[float] = None
    seconds: Optional[float] = None
    device: Optional[str] = None
    refused: Optional[str] = None  # why it could not be evaluated


def _point(**fields: Any) -> Point:
    """A point of a file, if its fields have their types, and numbers if it was evaluated."""
    for name, kind in get_type_hints(Point).items():
        if not isinstance(fields.get(name), get_args(kind) or kind):
            raise TypeError(name)
    point = Point(**fields)
    measured = (point.bits, point.perplexity, point.seconds)
    if point.refused is None and not all(number is not None and math.isfinite(number) for number in measured):
        raise ValueError("not evaluated and not refused")
    return point


def shown(size: int) -> str:
    """A chunk size or a number of tokens, for people."""
    return "none" if size == -1 else f"{size:,}"


class Record:
    """Points of one checkpoint on one split: those in PREFIX.json, and new ones, which `add` writes at once."""

    def __init__(self, prefix: str, origin: Dict[str, Dict[str, Any]], force: bool = False):
        self.prefix, self.origin = prefix, origin
        if force:
            with contextlib.suppress(FileNotFoundError):
                os.remove(f"{prefix}.json")
        self._points = self._read()

    def _read(self) -> Dict[Tuple[int, str], Point]:
        path = f"{self.prefix}.json"
        if not os.path.exists(path):
            return {}
        try:
            with open(path) as file:
                found = json.load(file)
            points = [_point(**point) for point in found["points"]]
            other = [part for part in OTHER if found[part]["fingerprint"] != self.origin[part]["fingerprint"]]
            places = [found[part]["path"] for part in other]
        except (KeyError, TypeError, ValueError):
            raise UserError(f"{path} was not written by a sweep; give another --out, or --force") from None
        if other:
            raise UserError(
                f"{path} contains results of {OTHER[other[0]]} ({places[0]}, compared by content); give another --out, "
                "or --force to replace it"
            )
        return {(point.chunk, point.cut): point for point in points}

    @property
    def points(self) -> List[Point]:
        """All points by context length."""
        return sorted(self._points.values(), key=lambda point: (point.context, point.cut, point.chunk))

    def contains(self, chunk: int, cut: str) -> bool:
        """Whether this point was evaluated; a point that could not be evaluated is tried again."""
        return (chunk, cut) in self._points and self._points[chunk, cut].refused is None

    def add(self, point: Point) -> None:
        with locked(os.path.dirname(self.prefix) or "."):  # another sweep may have written points in the meantime
            self._points = {**self._read(), **self._points, (point.chunk, point.cut): point}
            write_json(self.prefix, {**self.origin, "points": [known._asdict() for known in self.points]})
            table = io.StringIO()
            lines = csv.writer(table, lineterminator="\n")
            lines.writerow(Point._fields)
            lines.writerows(self.points)
            write(f"{self.prefix}.csv", table.getvalue().encode())
