"""Samples and batches for language models and their criterion, made from parts of a corpus."""

from typing import Any, Dict, List

import numpy as np
import torch
from fairseq.data import FairseqDataset, data_utils
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


def shifted(corpus: Corpus, start: int, stop: int, first: bool, eos: int) -> Dict[str, Tensor]:
    """Return tokens start .. stop - 1 as targets and the token before each as source: `eos` if `first`."""
    tokens = torch.cat([torch.tensor([eos]), corpus.read(start, stop)]) if first else corpus.read(start - 1, stop)
    return {"source": tokens[:-1], "target": tokens[1:]}


def collate(samples: List[Dict[str, Any]], pad: int) -> Dict[str, Any]:
    """Batch samples, padded on the right; fairseq passes no samples if a process has run out of batches."""
    if not samples:
        return {}
    target = data_utils.collate_tokens([sample["target"] for sample in samples], pad)  # (B, L)
    lengths = torch.tensor([sample["target"].numel() for sample in samples])
    return {
        "id": torch.tensor([sample["id"] for sample in samples]),
        "nsentences": len(samples),
        "ntokens": int(lengths.sum()),
        "net_input": {
            "src_tokens": data_utils.collate_tokens([sample["source"] for sample in samples], pad),
            "src_lengths": lengths,
        },
        "target": target,
    }


def beginning(batch: Dict[str, Any], length: int) -> Dict[str, Any]:
    """Return the first tokens of a batch's first row as a batch."""
    net_input, target = batch["net_input"], batch["target"][:1, :length]
    return {
        "id": batch["id"][:1],
        "nsentences": 1,
        "ntokens": target.numel(),
        "net_input": {
            "src_tokens": net_input["src_tokens"][:1, :length],
            "src_lengths": net_input["src_lengths"][:1].clamp(max=length),
        },
        "target": target,
    }
