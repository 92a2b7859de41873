"""Beam search over the likeliest tokens of each row.

It chooses as fairseq's search does: of the best 2 b candidates of a sentence those that end among the first b become
hypotheses, the first b others go on, and a sentence with b hypotheses is done. Instead of copying hypotheses from row
to row, each step records which beam every beam continues, and `hypotheses` follows these records back in the end.
"""

import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import List, NamedTuple, Optional

import numpy as np

from mega_runtime.decoder import Candidates
from mega_runtime.folder import LARGEST, check_finite
from mega_runtime.lines import LineRules

NEVER = np.float32(-np.inf)
KINDS = {Integral: "a whole number", Real: "a number"}
HUGE = 1e30  # beyond, the sum of scores can be infinite
LIMITS = {  # of options
    "beam": (Integral, 1, LARGEST),
    "min_len": (Integral, 0, LARGEST),
    "max_len_b": (Integral, 0, LARGEST),
    "max_len_a": (Real, 0, math.inf),
    "lenpen": (Real, 0, 50),  # above 80, the power of a length can be infinite
    "unkpen": (Real, -HUGE, HUGE),
}


class Special(NamedTuple):
    """Numbers of the types with rules of their own."""

    pad: int
    eos: int
    unk: int
    separator: Optional[int] = None  # of lines, in the target

    @property
    def asked(self) -> List[int]:
        """The types whose log-probabilities a step returns in any case."""
        return [self.eos, self.unk] + [self.separator] * (self.separator is not None)


@dataclass(frozen=True)
class Options:
    """Options of a search, with fairseq's names and defaults."""

    beam: int = 5
    lenpen: float = 1.0
    min_len: int = 1
    max_len_a: float = 0.0
    max_len_b: int = 200
    unkpen: float = 0.0

    def __post_init__(self) -> None:
        for name, (kind, least, most) in LIMITS.items():
            value = getattr(self, name)
            if not isinstance(value, kind) or not least <= value <= most:
                upto = f" to {most:,}" * (most < math.inf)
                raise ValueError(f"{name} is {value!r}; give {KINDS[kind]} from {least:,}{upto}")
            # Neither NumPy's, of few bits, nor a whole number beyond those of floats.
            object.__setattr__(self, name, int(value) if kind is Integral else float(min(value, HUGE)))

    def max_len(self, length: int, limit: int) -> int:
        """The most tokens of the translation of a source with so many, of a model that writes up to `limit`."""
        return int(min(self.max_len_a * length + self.max_len_b, limit))


class Hypothesis(NamedTuple):
    tokens: List[int]  # with eos
    score: float


class Search:
    """The search for S sentences; tokens (S, b) are the newest ones, parents (S, b) the beams that they continue."""

    def __init__(self, longest: np.ndarray, options: Options, special: Special, lines: Optional[LineRules]):
        """Sentence i has at most longest[i] tokens before eos."""
        self.options, self.special, self.longest, self.lines = options, special, longest, lines
        shape = len(longest), options.beam
        self.tokens, self.parents = np.full(shape, special.eos), np.tile(np.arange(options.beam), (len(longest), 1))
        self.totals, self.closed = np.zeros(shape, np.float32), np.zeros(shape, bool)
        self.count = np.zeros(len(longest), int)  # hypotheses
        self.number = 0  # of the next step
        self.active = np.arange(len(longest))  # the sentences of the rows
        self.ends: List[List] = [[] for _ in longest]  # (step, beam that ends, total)
        self.records: List[np.ndarray] = []  # tokens and parents of each step, (2, S, b)

    @property
    def candidates(self) -> int:
        """How many tokens of each row are needed: 2 b besides special ones."""
        return 2 * self.options.beam + len(self.special.asked) + 1

    def step(self, found: Candidates) -> np.ndarray:
        """Chooses the next tokens; returns which sentences, of those in the search, are not done."""
        check_finite(found.top[:, 0])
        beams, first, last = self.options.beam, self.number == 0, self.number >= self.longest  # (S,)
        sentences = len(self.tokens)
        types = np.concatenate([found.types, np.broadcast_to(self.special.asked, found.special.shape)], 1)
        of_rows = last.repeat(beams)
        scores = np.concatenate([self._ordinary(found, of_rows), self._special(found, of_rows)], 1)
        scores = scores.reshape(sentences, beams, -1)  # (S, b, k)
        scores = scores[:, :1] if first else scores + self.totals[:, :, None]  # at first, all beams are alike
        width, scores = scores.shape[2], scores.reshape(sentences, -1)
        best = np.argsort(-scores, axis=1, kind="stable")[:, : 2 * beams]  # half of them may be eos
        scores = np.take_along_axis(scores, best, 1)
        parents = best // width
        tokens = np.take_along_axis(types.reshape(sentences, -1), best, 1)

        ends = (tokens == self.special.eos) & (scores != NEVER)
        for sentence, place in zip(*(ends[:, :beams] & ~self.closed).nonzero()):
            self.ends[self.active[sentence]].append((self.number, parents[sentence, place], scores[sentence, place]))
            self.count[sentence] += 1
        ends[:, :beams] |= self.closed
        # The first b candidates that remain; if there are fewer, candidates that have ended fill the places.
        order = np.arange(ends.shape[1])
        going = np.argsort(np.where(ends, order + len(order), order), axis=1)[:, :beams]
        done = last | (self.count >= beams)
        self.closed = np.take_along_axis(ends, going, 1) | done[:, None]
        self.tokens, self.parents, self.totals = (np.take_along_axis(t, going, 1) for t in (tokens, parents, scores))
        record = np.zeros((2, len(self.ends), beams), np.int32)
        record[:, self.active] = self.tokens, self.parents
        self.records.append(record)
        if self.lines is not None:
            self.lines.advance(self.tokens, self.parents)
        self.number += 1
        return ~done

    def _ordinary(self, found: Candidates, last: np.ndarray) -> np.ndarray:
        """The scores (R, k) of the likeliest types, without special ones."""
        hidden = np.isin(found.types, [self.special.pad, *self.special.asked])
        if self.lines is not None:
            hidden |= self.lines.full(self.number).reshape(-1, 1)
        return np.where(hidden | last[:, None], NEVER, found.top)

    def _special(self, found: Candidates, last: np.ndarray) -> np.ndarray:
        """The scores (R, s) of `Special.asked`."""
        scores = found.special.copy()
        scores[:, 1] -= self.options.unkpen
        scores[last, 1:] = NEVER
        if self.number < self.options.min_len:
            scores[~last, 0] = NEVER
        if self.lines is not None:
            self.lines.apply(scores, self.number)
        return scores

    def keep(self, sentences: np.ndarray) -> None:
        """Goes on with these sentences only."""
        for name in ("tokens", "parents", "totals", "closed", "count", "active", "longest"):
            setattr(self, name, getattr(self, name)[sentences])
        if self.lines is not None:
            self.lines.keep(sentences)

    def settled(self, sentence: int, start: int) -> List[int]:
        """The tokens from `start` on, of a sentence that is not done, in which it can no longer change.

        They are what its beams and its hypotheses have in common: whatever follows continues one of these.
        """
        ends, tokens = [(step, beam) for step, beam, _ in self.ends[sentence]], []
        beams = set((~self.closed[self.active == sentence][0]).nonzero()[0])
        for step in range(self.number - 1, start - 1, -1):
            beams |= {beam for end, beam in ends if end == step + 1}
            if len(beams) == 1 and all(end > step for end, _ in ends):
                tokens.append(int(self.records[step][0, sentence, min(beams)]))
            beams = {self.records[step][1, sentence, beam] for beam in beams}
        return tokens[::-1]

    def hypotheses(self, sentence: int) -> List[Hypothesis]:
        """The best hypotheses of a sentence, sorted by score."""
        found = []
        for step, beam, total in self.ends[sentence][: self.options.beam]:
            tokens = [self.special.eos]
            for record in reversed(self.records[:step]):
                tokens.append(int(record[0, sentence, beam]))
                beam = record[1, sentence, beam]
            found.append(Hypothesis(tokens[::-1], float(total) / (step + 1) ** self.options.lenpen))
        return sorted(found, key=lambda hypothesis: -hypothesis.score)
