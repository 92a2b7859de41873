"""Validation and test: the split as consecutive streams, each read from start to end with carried state."""

import re
from typing import Any, Dict, List, Optional

import numpy as np
from fairseq.data import FairseqDataset

from mega_fairseq.data.batches import collate, shifted
from mega_fairseq.data.corpus import Corpus


class StreamDataset(FairseqDataset):
    """One sample a stream, as long as it is: the model walks through it piece by piece.

    A stream knows nothing of what came before it: it starts from `eos`, with an empty state.
    """

    def __init__(self, corpus: Corpus, bounds: np.ndarray, pad: int, eos: int, targets_only: bool = False):
        self.corpus, self.bounds, self.pad, self.eos = corpus, bounds, pad, eos
        self.sizes = np.diff(bounds)
        self.targets_only = targets_only

    def for_scoring(self) -> "StreamDataset":
        """The same streams for a scorer that asks the model for nothing but its targets."""
        return StreamDataset(self.corpus, self.bounds, self.pad, self.eos, targets_only=True)

    def __len__(self) -> int:
        return self.sizes.size

    def __getitem__(self, index: int) -> Dict[str, Any]:
        start, stop = int(self.bounds[index]), int(self.bounds[index + 1])
        return {"id": index, **shifted(self.corpus, start, stop, True, self.eos)}

    def collater(self, samples: List[Dict[str, Any]]) -> Dict[str, Any]:
        batch = collate(samples, self.pad)
        if batch and self.targets_only:
            batch["net_input"]["target"] = batch["target"]
        return batch

    def num_tokens(self, index: int) -> int:
        return int(self.sizes[index])

    def size(self, index: int) -> int:
        return int(self.sizes[index])

    @property
    def longest(self) -> int:
        return int(self.sizes.max())

    def ordered_indices(self) -> np.ndarray:
        """The longest first, so that a batch needs as many columns as its first stream has tokens."""
        return np.argsort(-self.sizes, kind="stable")

    def batch_by_size(
        self,
        indices: np.ndarray,
        max_tokens: Optional[int] = None,
        max_sentences: Optional[int] = None,
        **unused: Any,
    ) -> List[List[int]]:
        """Streams of like length side by side: as many as the limits allow, and one where it alone exceeds them."""
        found: List[List[int]] = []
        for index in indices.tolist():
            rows = len(found[-1]) + 1 if found else 1
            fits = found and (not max_sentences or rows <= max_sentences)
            if fits and (not max_tokens or rows * self.sizes[found[-1][0]] <= max_tokens):
                found[-1].append(index)
            else:
                found.append([index])
        return found


def stream_bounds(valid_block: str, documents: np.ndarray) -> np.ndarray:
    """Borders of streams: `splits:K` of one length, `size:N` tokens each, or `documents`."""
    total = int(documents[-1])
    if valid_block == "documents":
        return documents
    kind, number = re.fullmatch(r"(splits|size):(\d+)", valid_block).groups()
    if kind == "size":
        return np.append(np.arange(0, total, int(number)), total)
    if int(number) > total:
        raise ValueError(f"--valid-block is {valid_block!r} and the split has only {total:,} tokens; give fewer splits")
    return np.linspace(0, total, int(number) + 1).round().astype(np.int64)


def check_valid_block(valid_block: str) -> None:
    given = re.fullmatch(r"(?:splits|size):(\d+)|documents", valid_block)
    if given is None or given.group(1) and int(given.group(1)) < 1:
        raise ValueError(
            f"--valid-block is {valid_block!r}; give splits:K for K streams of one length, size:N for streams of N "
            "tokens, or documents"
        )
