"""Texts of several lines: as many lines out as in, and cross attention that depends on the lines of both sides.

A place is the number of a token's line and its offset in it.
"""

from typing import Any, Dict, List, Sequence

import numpy as np

NEVER = np.float32(-np.inf)


def split(tokens: Sequence[int], separator: int) -> List[List[int]]:
    """Tokens as lines."""
    lines: List[List[int]] = [[]]
    for token in tokens:
        if token == separator:
            lines.append([])
        else:
            lines[-1].append(token)
    return lines


def longest_line(length: int, a: float, b: float) -> int:
    """The most tokens of the translation of a line with so many."""
    return max(1, int(a * length + b))


class LineRules:
    """Which tokens S sentences may still take if their hypotheses are to have the lines of their sources."""

    def __init__(
        self,
        sources: Sequence[Sequence[int]],
        source_separator: int,
        separator: int,
        a: float,
        b: float,
        limit: int,
        beams: int,
    ):
        """Each line has at most a n + b tokens for n of the source, and a hypothesis at most `limit` before eos."""
        lines = [list(map(len, split(source[:-1], source_separator))) for source in sources]  # without eos
        most = max(map(len, lines))
        self.longest = np.ones((len(lines), most), int)  # of a line, the last line first
        for row, lengths in enumerate(lines):
            self.longest[row, : len(lengths)] = [longest_line(n, a, b) for n in reversed(lengths)]
        whole = [(self.longest[row, : len(each)] + 1).sum() - 1 for row, each in enumerate(lines)]
        self.limit = np.minimum(whole, limit)  # (S,)
        if 2 * most - 1 > limit:
            raise ValueError(f"a source has {most:,} lines and the model writes {limit:,} tokens; give shorter windows")
        self.left = np.array([len(each) - 1 for each in lines])[:, None].repeat(beams, 1)  # separators to write
        self.length = np.zeros_like(self.left)  # tokens of the unfinished line
        self.separator = separator

    def full(self, number: int) -> np.ndarray:
        """(S, b) whether the line must end; each further line takes one token and its end, at least."""
        longest = np.take_along_axis(self.longest, self.left.clip(0), 1)
        return (self.length >= longest) | (2 * self.left >= self.limit[:, None] - number)

    def apply(self, scores: np.ndarray, number: int) -> None:
        """Excludes eos, unknown and the separator from the scores (R, 3) of these."""
        blank, last = (self.length == 0).ravel(), (self.left <= 0).ravel()
        scores[blank | ~last, 0] = NEVER
        scores[self.full(number).ravel(), 1] = NEVER
        scores[blank | last, 2] = NEVER

    def advance(self, tokens: np.ndarray, parents: np.ndarray) -> None:
        new = tokens == self.separator
        self.left = np.take_along_axis(self.left, parents, 1) - new
        self.length = np.where(new, 0, np.take_along_axis(self.length, parents, 1) + 1)

    def keep(self, sentences: np.ndarray) -> None:
        for name in ("longest", "limit", "left", "length"):
            setattr(self, name, getattr(self, name)[sentences])


class Places:
    """Where target and source tokens are, for cross attention by line: the bias of each pair, as a number in a table.

    The table has a row of distances of offsets for each distance of lines, and one last number for what is hidden.
    """

    def __init__(self, tokens: np.ndarray, real: np.ndarray, table: Dict[str, Any], beams: int):
        """Sources (S, m), real tokens first. `table` is that of config.json."""
        self.table, self.real = table, real[:, None]
        starts = np.zeros(tokens.shape, bool)
        starts[:, 1:] = tokens[:, :-1] == table["source_separator"]
        line, offset = (starts & real).cumsum(1), real.cumsum(1) - 1
        if table["within_lines"]:
            offset = offset - np.maximum.accumulate(offset * starts, 1)
        self.source = line[:, None], offset[:, None]  # (S, 1, m)
        self.line = np.zeros((len(tokens), beams), int)  # of the newest token of each row
        self.offset = np.full_like(self.line, -1)  # before the first one

    def advance(self, tokens: np.ndarray, parents: np.ndarray, numbers: np.ndarray) -> None:
        """Writes the numbers (S, b, m) for the next tokens (S, b); lines beyond the last of the source count as it."""
        table = self.table
        starts = tokens == table["target_separator"]
        line = np.take_along_axis(self.line, parents, 1) + starts
        self.line = np.minimum(line, self.source[0].max(2))
        self.offset = np.take_along_axis(self.offset, parents, 1) + 1
        if table["within_lines"]:
            self.offset[starts] = 0
        distance = self.source[0] - self.line[:, :, None]  # (S, b, m)
        hidden = ~self.real
        if table["window"] is not None:
            hidden = hidden | (np.abs(distance) > table["window"])
        near, width = table["near"], table["width"]
        column = (self.source[1] - self.offset[:, :, None] - table["first"]).clip(0, width - 1)
        row = distance.clip(-near, near) + near
        np.copyto(numbers, np.where(hidden, (2 * near + 1) * width, row * width + column))

    def keep(self, sentences: np.ndarray) -> None:
        self.real, self.line, self.offset = self.real[sentences], self.line[sentences], self.offset[sentences]
        self.source = tuple(t[sentences] for t in self.source)
