"""The results of a sweep: PREFIX.json, from which an interrupted sweep resumes, and the same as PREFIX.csv."""

import csv
import io
import json
import os
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

from mega_fairseq.cli import UserError
from mega_fairseq.cli.output import write

IDENTITY = (("checkpoint", "fingerprint"), ("data", "fingerprint"), ("data", "subset"))


class Point(NamedTuple):
    """One evaluation of a split: the attention's chunk size, and how the split was cut into streams."""

    chunk: int
    cut: str  # splits:K, size:N, documents:line or documents:blank
    streams: int
    context: int  # tokens of the longest stream
    tokens: int
    bits: Optional[float] = None  # loss to base 2 per token; None if the point could not be evaluated
    perplexity: Optional[float] = None
    seconds: Optional[float] = None
    device: Optional[str] = None
    refused: Optional[str] = None  # why it could not be evaluated


class Record:
    """Points of one checkpoint on one split. `add` writes each to the disk at once."""

    def __init__(self, prefix: str, origin: Dict[str, Dict[str, Any]], points: Dict[Tuple[int, str], Point]):
        self.prefix, self.origin, self._points = prefix, origin, points
        self._replace = False  # whether the next `add` discards what is on the disk

    @classmethod
    def open(cls, prefix: str, origin: Dict[str, Dict[str, Any]], force: bool = False) -> "Record":
        """Continue PREFIX.json if it is of the same checkpoint and data; with `force` start a new one."""
        if force or not os.path.exists(f"{prefix}.json"):
            new = cls(prefix, origin, {})
            new._replace = force
            return new
        try:
            with open(f"{prefix}.json") as file:
                found = json.load(file)
            points = [Point(**point) for point in found["points"]]
            other = [part for part, key in IDENTITY if found[part][key] != origin[part][key]]
            places = {part: found[part]["path"] for part in other}
        except (KeyError, TypeError, ValueError):
            raise UserError(
                f"{prefix}.json was not written by a sweep; give another --out, or --force to replace it"
            ) from None
        if other:
            what = {"checkpoint": "another checkpoint", "data": "other data or another subset"}[other[0]]
            raise UserError(
                f"{prefix}.json contains results of {what} ({places[other[0]]}, compared by content); give another "
                "--out, or --force to replace it"
            )
        return cls(prefix, origin, {(point.chunk, point.cut): point for point in points})

    @property
    def points(self) -> List[Point]:
        """All points by context length."""
        return sorted(self._points.values(), key=lambda point: (point.context, point.cut, point.chunk))

    def contains(self, chunk: int, cut: str) -> bool:
        """Whether this point was evaluated; one that could not be is tried again."""
        return (chunk, cut) in self._points and self._points[chunk, cut].refused is None

    def add(self, point: Point) -> None:
        if not self._replace:  # another sweep may have written points since
            self._points = {**Record.open(self.prefix, self.origin)._points, **self._points}
        self._replace = False
        self._points[point.chunk, point.cut] = point
        content = {**self.origin, "points": [known._asdict() for known in self.points]}
        write(f"{self.prefix}.json", (json.dumps(content, indent=1) + "\n").encode())
        table = io.StringIO()
        lines = csv.writer(table, lineterminator="\n")
        lines.writerow(Point._fields)
        lines.writerows(self.points)
        write(f"{self.prefix}.csv", table.getvalue().encode())
