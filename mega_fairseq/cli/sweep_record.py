"""What a sweep leaves behind: its points in PREFIX.json, which it goes on from, and the same as PREFIX.csv."""

import csv
import io
import json
import os
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

from mega_fairseq.cli.files import check_folder, write
from mega_fairseq.cli.refusal import Refusal

ENDINGS = (".json", ".csv", ".png")
IDENTITY = (("checkpoint", "fingerprint"), ("data", "fingerprint"), ("data", "subset"))  # of what a record is


class Point(NamedTuple):
    """A model that attends in chunks of one size, over a split that is cut in one way."""

    chunk: int
    cut: str  # splits:K, size:N, documents:line or documents:blank
    streams: int
    context: int  # tokens of the longest stream
    tokens: int
    bits: Optional[float] = None  # loss to base 2 per token; None where the point was refused
    perplexity: Optional[float] = None
    seconds: Optional[float] = None
    device: Optional[str] = None
    refused: Optional[str] = None  # why


class Record:
    """Points of one checkpoint on one split of one data set; each that is added is on the disk at once."""

    def __init__(self, prefix: str, origin: Dict[str, Dict[str, Any]], points: Dict[Tuple[int, str], Point]):
        self.prefix, self.origin, self._points = prefix, origin, points
        self._anew = False  # whether what is on the disk is to be replaced

    @classmethod
    def open(cls, prefix: str, origin: Dict[str, Dict[str, Any]], force: bool = False) -> "Record":
        """A new one, or what an earlier sweep of the same has come to."""
        if force or not os.path.exists(f"{prefix}.json"):
            new = cls(prefix, origin, {})
            new._anew = force
            return new
        try:
            with open(f"{prefix}.json") as file:
                found = json.load(file)
            points = [Point(**point) for point in found["points"]]
            other = [part for part, key in IDENTITY if found[part][key] != origin[part][key]]
            places = {part: found[part]["path"] for part in other}
        except (KeyError, TypeError, ValueError):
            raise Refusal(
                f"{prefix}.json was not written by a sweep; give another --out, or --force to replace it"
            ) from None
        if other:
            what = {"checkpoint": "another checkpoint", "data": "other data or another subset"}[other[0]]
            raise Refusal(
                f"{prefix}.json is of {what} ({places[other[0]]}, by its content); give another --out, or --force to "
                "start anew"
            )
        return cls(prefix, origin, {(point.chunk, point.cut): point for point in points})

    @property
    def points(self) -> List[Point]:
        """All, the longest contexts last."""
        return sorted(self._points.values(), key=lambda point: (point.context, point.cut, point.chunk))

    def knows(self, chunk: int, cut: str) -> bool:
        """Whether this point was evaluated: one that was refused is tried again."""
        return (chunk, cut) in self._points and self._points[chunk, cut].refused is None

    def add(self, point: Point) -> None:
        if not self._anew:  # another sweep may have written other points since
            self._points = {**Record.open(self.prefix, self.origin)._points, **self._points}
        self._anew = False
        self._points[point.chunk, point.cut] = point
        content = {**self.origin, "points": [known._asdict() for known in self.points]}
        write(f"{self.prefix}.json", (json.dumps(content, indent=1) + "\n").encode())
        table = io.StringIO()
        lines = csv.writer(table, lineterminator="\n")
        lines.writerow(Point._fields)
        lines.writerows(self.points)
        write(f"{self.prefix}.csv", table.getvalue().encode())


def check_prefix(prefix: str, force: bool) -> None:
    """Before any work: whether PREFIX.* can be written, and are nobody else's."""
    check_folder(prefix, "sweep")
    for path in (prefix + ending for ending in ENDINGS):
        if os.path.isdir(path):
            raise Refusal(f"{path} is a folder; give another --out")
        if not force and os.path.exists(path) and not os.path.exists(f"{prefix}.json"):
            raise Refusal(f"{path} exists and no sweep wrote it; give another --out, or --force to replace it")
