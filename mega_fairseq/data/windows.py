"""Windows of documents: consecutive lines of one document, joined to one sample of a translation model."""

from typing import Iterable, List, NamedTuple, Optional, Tuple

import numpy as np
import torch
from fairseq.data import LanguagePairDataset
from numpy.random import default_rng
from torch import Tensor
from torch.utils.data import Dataset

from mega_fairseq.data.batches import InWholeBatches

LEAST_BUDGET = 64  # tokens, of windows drawn for training


class Draw(NamedTuple):
    """How windows for training are drawn, anew in each epoch."""

    seed: int
    single_lines: float  # share of documents that are cut into windows of one line
    full: bool  # whether all budgets are the limit, instead of log-uniform below it


class WindowDataset(InWholeBatches, LanguagePairDataset):
    """Sentence pairs joined to windows: line separator line ... separator line eos, with the same number of lines and
    at most `limit` tokens on each side.

    A window has as many tokens as its lines have with an eos each. Each epoch has every line once. The windows depend
    only on the lines and `limit`, or with `draw` also on (seed, epoch); they are numbered in the order of the lines.
    """

    def __init__(
        self,
        lines: LanguagePairDataset,
        documents: np.ndarray,
        limit: int,
        separators: Tuple[int, int],
        draw: Optional[Draw] = None,
    ):
        self.documents, self.limit, self.draw = documents, limit, draw
        sides = [(lines.src, lines.src_sizes), (lines.tgt, lines.tgt_sizes)][: 1 if lines.tgt is None else 2]
        sizes = np.stack([line_sizes for _, line_sizes in sides], 1).astype(np.int64)
        self.ends = np.concatenate([np.zeros_like(sizes[:1]), sizes.cumsum(0)])  # (lines + 1, sides)
        self.joined = [JoinedLines(side, separator) for (side, _), separator in zip(sides, separators)]
        self.epoch: Optional[int] = None
        nothing = np.empty(0, dtype=np.int64)
        super().__init__(
            self.joined[0],
            nothing,
            lines.src_dict,
            self.joined[1] if lines.tgt is not None else None,
            nothing if lines.tgt is not None else None,
            lines.tgt_dict,
            left_pad_source=lines.left_pad_source,
            left_pad_target=lines.left_pad_target,
            shuffle=lines.shuffle,
            pad_to_multiple=lines.pad_to_multiple,
        )
        self.set_epoch(1)

    @property
    def longest(self) -> int:
        """Tokens of the longest window in any epoch, at most."""
        return min(self.limit, int((self.ends[self.documents[1:]] - self.ends[self.documents[:-1]]).max()))

    def set_epoch(self, epoch: int) -> None:
        if self.epoch is not None and (self.draw is None or epoch == self.epoch):
            return
        self.epoch = epoch
        bounds = windows(self.documents, self.ends, self.limit, self.draw, epoch)
        for side in self.joined:
            side.bounds = bounds
        sizes = np.diff(self.ends[bounds], axis=0)  # (windows, sides)
        self.src_sizes, self.tgt_sizes = sizes[:, 0], sizes[:, 1] if self.tgt is not None else None
        self.sizes = sizes if self.tgt is not None else self.src_sizes

    @property
    def can_reuse_epoch_itr_across_epochs(self) -> bool:
        return self.draw is None


class JoinedLines(Dataset):
    """One side of the windows between `bounds`."""

    def __init__(self, lines: Dataset, separator: int):
        self.lines, self.separator = lines, separator
        self.bounds = np.zeros(1, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def __getitem__(self, index: int) -> Tensor:
        parts = [self.lines[line] for line in range(self.bounds[index], self.bounds[index + 1])]
        window = torch.cat(parts)
        ends = np.cumsum([len(part) for part in parts])[:-1] - 1
        window[torch.from_numpy(ends)] = self.separator  # instead of their eos
        return window

    @property
    def supports_prefetch(self) -> bool:
        return getattr(self.lines, "supports_prefetch", False)

    def prefetch(self, indices: Iterable[int]) -> None:
        self.lines.prefetch([line for i in indices for line in range(self.bounds[i], self.bounds[i + 1])])


def windows(documents: np.ndarray, ends: np.ndarray, limit: int, draw: Optional[Draw], epoch: int) -> np.ndarray:
    """Borders of windows in one epoch: each as long as `limit` allows, if they are not drawn.

    With `draw`, they are single lines, or a document has one budget, in which every octave of lengths has as many
    tokens. The first window of a document is then shortened at random, so that the others begin elsewhere.

    `documents` are the borders of D documents (D + 1,) and `ends` the tokens before each line on each side.
    """
    numbers = 3, len(documents) - 1
    single, budget, first = np.ones(numbers) if draw is None else default_rng((draw.seed, epoch)).random(numbers)
    single_lines, full = (0.0, True) if draw is None else (draw.single_lines, draw.full)
    least = np.log(min(LEAST_BUDGET, limit))
    budgets = np.full_like(budget, limit) if full else np.exp(least + budget * (np.log(limit) - least))
    alone = single < single_lines
    (lines,) = np.repeat(alone, np.diff(documents)).nonzero()  # that are windows
    bounds: List[int] = [0]
    starts, stops, first, budgets = (each[~alone] for each in (documents[:-1], documents[1:], first, budgets))
    for start, stop, share, most in zip(starts.tolist(), stops.tolist(), first, budgets):
        bounds += cut(ends, start, stop, share * most, most)
    return np.sort(np.concatenate([bounds, lines + 1]))


def cut(ends: np.ndarray, start: int, stop: int, first: float, budget: float) -> List[int]:
    """The ends of windows of lines start .. stop - 1, as many lines as fit; a longer line is a window of its own."""
    bounds, most = [start], first
    while bounds[-1] < stop:
        last = bounds[-1]
        sides = zip(ends[last + 1 : stop + 1].T, ends[last])
        fitting = min(int(np.searchsorted(side, begin + most, "right")) for side, begin in sides)
        bounds.append(last + max(1, fitting))
        most = budget
    return bounds[1:]
