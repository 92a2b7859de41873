"""Typed texts to continue or score, for fairseq-interactive and `from_pretrained`."""

from typing import Any, Dict, List

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from mega_fairseq.data.batches import SizedDataset, collate


class TextDataset(SizedDataset):
    """Texts, without `eos` at their ends, as sources that start from `eos` and as their targets."""

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

    def collater(self, samples: List[Dict[str, Any]]) -> Dict[str, Any]:
        batch = collate(samples, self.pad)
        if batch:
            batch["net_input"]["target"] = batch["target"]  # scoring only needs the probabilities of targets
        return batch
