"""What datasets share; samples and batches of language models, from parts of a corpus or from typed texts."""

from typing import Any, Dict, List, Optional

import numpy as np
import torch
import torch.nn.functional as F
from fairseq.data import FairseqDataset
from fairseq.data.monolingual_dataset import collate
from fairseq.utils import apply_to_sample
from torch import Tensor

from mega_fairseq.data.corpus import Corpus


class SizedDataset(FairseqDataset):
    """A dataset whose `sizes` has the number of tokens of each sample."""

    sizes: np.ndarray

    def __len__(self) -> int:
        return len(self.sizes)

    def num_tokens(self, index: int) -> int:
        return int(self.sizes[index])

    def num_tokens_vec(self, indices: np.ndarray) -> np.ndarray:
        return self.sizes[indices]

    def size(self, index: int) -> int:
        return int(self.sizes[index])


class InWholeBatches:
    """A mixin for datasets of which no sample may be missing in training."""

    def batch_by_size(
        self,
        indices: np.ndarray,
        max_tokens: Optional[int] = None,
        max_sentences: Optional[int] = None,
        required_batch_size_multiple: int = 1,
    ) -> Any:
        """Ignore the multiple, because fairseq would drop the remaining samples."""
        return super().batch_by_size(indices, max_tokens, max_sentences)


def shifted(corpus: Corpus, start: int, stop: int, first: bool, eos: int) -> Dict[str, Tensor]:
    """Return tokens start .. stop - 1 as targets and the token before each as source: `eos` if `first`."""
    tokens = torch.cat([torch.tensor([eos]), corpus.read(start, stop)]) if first else corpus.read(start - 1, stop)
    return {"source": tokens[:-1], "target": tokens[1:]}


class TokenDataset(SizedDataset):
    """Samples of source and target tokens."""

    pad: int
    targets_only = False  # whether models compute the probabilities of the targets only

    def collater(self, samples: List[Dict[str, Any]]) -> Dict[str, Any]:
        """Batch samples, padded on the right; fairseq passes no samples if a process has run out of batches."""
        batch = collate(samples, self.pad, eos_idx=None)
        if batch and self.targets_only:
            batch["net_input"]["target"] = batch["target"]
        return batch


def beginning(batch: Dict[str, Any], length: int) -> Dict[str, Any]:
    """Return the first tokens of a batch's first row as a batch."""
    part = apply_to_sample(lambda t: t[:1, :length] if t.dim() == 2 else t[:1], batch)
    part["net_input"]["src_lengths"] = part["net_input"]["src_lengths"].clamp(max=length)
    return {**part, "nsentences": 1, "ntokens": part["target"].numel()}


class TextDataset(TokenDataset):
    """Typed texts to continue or score, without `eos` at their ends: sources that start from `eos`, and targets."""

    targets_only = True

    def __init__(self, texts: List[Tensor], pad: int, eos: int):
        if any((text == pad).any() for text in texts):
            raise ValueError("a text contains <pad>, which is not a token of texts; remove it")
        self.texts, self.pad, self.eos = texts, pad, eos
        self.sizes = np.array([len(text) for text in texts])

    def __getitem__(self, index: int) -> Dict[str, Any]:
        text = self.texts[index]
        words = text.ne(self.eos).nonzero()
        text = text[words[0] : words[-1] + 1] if len(words) else text[:0]
        source, target = F.pad(text, (1, 0), value=self.eos), F.pad(text, (0, 1), value=self.pad)
        return {"id": index, "source": source, "target": target}
