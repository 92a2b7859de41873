"""Training samples: segments of m chunks, with m drawn at random for each segment and epoch (paper, section 4.4)."""

from typing import Any, Dict, Optional, Tuple

import numpy as np
from numpy.random import default_rng

from mega_fairseq.data.batches import InWholeBatches, TokenDataset, shifted
from mega_fairseq.data.corpus import Corpus


class SegmentDataset(InWholeBatches, TokenDataset):
    """Segments of a corpus: each epoch contains every token once, cut at positions that depend only on (seed, epoch).

    So a resumed run sees the same segments. The last segment of a document may be shorter. Sources are the targets
    shifted by one token, also across segments.
    """

    def __init__(
        self,
        corpus: Corpus,
        documents: np.ndarray,
        chunk: int,
        multiples: Tuple[int, int],
        seed: int,
        pad: int,
        eos: int,
    ):
        self.corpus, self.documents, self.chunk, self.multiples = corpus, documents, chunk, multiples
        self.seed, self.pad, self.eos = seed, pad, eos
        self.epoch: Optional[int] = None
        self.set_epoch(1)

    def set_epoch(self, epoch: int) -> None:
        if epoch == self.epoch:
            return
        self.epoch = epoch
        self.bounds = cut(self.documents, self.chunk, self.multiples, default_rng((self.seed, epoch)))
        self.sizes = np.diff(self.bounds)

    @property
    def longest(self) -> int:
        """Length of the longest segment in any epoch."""
        return min(self.multiples[1] * self.chunk, int(np.diff(self.documents).max()))

    @property
    def can_reuse_epoch_itr_across_epochs(self) -> bool:
        return False  # each epoch has other batches

    def __getitem__(self, index: int) -> Dict[str, Any]:
        start, stop = int(self.bounds[index]), int(self.bounds[index + 1])
        place = np.searchsorted(self.documents, start)
        return {"id": index, **shifted(self.corpus, start, stop, self.documents[place] == start, self.eos)}

    def ordered_indices(self) -> np.ndarray:
        """Sort by size, so that batches need little padding, and at random among equal sizes.

        Seeded like fairseq-fixed seeds numpy here; fairseq 0.12.2 uses the same seed in all epochs.
        """
        generator = np.random.RandomState((self.seed + self.epoch) % 2**32)
        return np.lexsort([generator.permutation(len(self)), self.sizes])


def cut(documents: np.ndarray, chunk: int, multiples: Tuple[int, int], rng: np.random.Generator) -> np.ndarray:
    """Return segment borders: each document is cut from its start in steps of m chunks, m uniform in [min, max]."""
    least, most = multiples
    bounds, sizes = [documents], np.diff(documents)
    for number in np.flatnonzero(sizes > least * chunk):
        start, stop = documents[number : number + 2]
        steps = rng.integers(least, most + 1, size=-(-(stop - start) // (least * chunk))) * chunk
        inner = start + np.cumsum(steps)
        bounds.append(inner[inner < stop])
    return np.sort(np.concatenate(bounds))
