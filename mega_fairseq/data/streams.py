"""Validation and test samples: consecutive streams, each read from start to end with carried state."""

import re
from typing import Any, Dict, List, Optional, Tuple

import numpy as np

from mega_fairseq.data.batches import TokenDataset, shifted
from mega_fairseq.data.corpus import Corpus


class StreamDataset(TokenDataset):
    """One sample per stream, of any length: the model reads it in pieces.

    A stream starts from `eos` with an empty state, without context from the stream before it.
    """

    def __init__(self, corpus: Corpus, bounds: np.ndarray, pad: int, eos: int, targets_only: bool = False):
        self.corpus, self.bounds, self.pad, self.eos = corpus, bounds, pad, eos
        self.sizes = np.diff(bounds)
        self.targets_only = targets_only

    def for_scoring(self) -> "StreamDataset":
        """Return the same streams for a scorer that needs the probabilities of the targets only."""
        return StreamDataset(self.corpus, self.bounds, self.pad, self.eos, targets_only=True)

    def __getitem__(self, index: int) -> Dict[str, Any]:
        start, stop = int(self.bounds[index]), int(self.bounds[index + 1])
        return {"id": index, **shifted(self.corpus, start, stop, True, self.eos)}

    @property
    def longest(self) -> int:
        return int(self.sizes.max())

    def ordered_indices(self) -> np.ndarray:
        """Sort the longest first, so that the first stream of a batch is as long as the batch."""
        return np.argsort(-self.sizes, kind="stable")

    def batch_by_size(
        self,
        indices: np.ndarray,
        max_tokens: Optional[int] = None,
        max_sentences: Optional[int] = None,
        **unused: Any,
    ) -> List[np.ndarray]:
        """Batch streams of similar length within the limits; a stream that exceeds them is a batch by itself."""
        found, start = [], 0
        while start < len(indices):
            rows = max_sentences or len(indices)
            if max_tokens:
                rows = min(rows, max(1, max_tokens // int(self.sizes[indices[start]])))
            found.append(indices[start : start + rows])
            start += rows
        return found


def stream_bounds(valid_block: str, documents: np.ndarray) -> np.ndarray:
    """Return stream borders: `splits:K` for K of equal length, `size:N` for N tokens each, or `documents`."""
    (kind, number), total = parse_valid_block(valid_block), int(documents[-1])
    if kind == "documents":
        return documents
    if kind == "size":
        return np.append(np.arange(0, total, number), total)
    if number > total:
        raise ValueError(f"--valid-block is {valid_block!r} and the split has only {total:,} tokens; give fewer splits")
    return np.linspace(0, total, number + 1).round().astype(np.int64)


def parse_valid_block(valid_block: str) -> Tuple[str, int]:
    given = re.fullmatch(r"(splits|size):0*([1-9]\d*)|documents", valid_block)
    if given is None:
        raise ValueError(
            f"--valid-block is {valid_block!r}; give splits:K for K streams of equal length, size:N for streams of N "
            "tokens, or documents"
        )
    return given.group(1) or "documents", int(given.group(2) or 0)
