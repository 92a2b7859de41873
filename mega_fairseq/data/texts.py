"""Typed texts to continue or score, for fairseq-interactive and `from_pretrained`."""

from typing import List

import numpy as np
from fairseq.data import (
    AppendTokenDataset,
    Dictionary,
    FairseqDataset,
    IdDataset,
    ListDataset,
    NestedDictionaryDataset,
    NumelDataset,
    PadDataset,
    PrependTokenDataset,
    StripTokenDataset,
)
from torch import Tensor


def typed_texts(tokens: List[Tensor], lengths: List[int], dictionary: Dictionary) -> FairseqDataset:
    """Texts as sources that start with eos, and as their targets."""
    if any((text == dictionary.pad()).any() for text in tokens):
        raise ValueError("a text contains <pad>, which is not a token of texts; remove it")
    texts = StripTokenDataset(ListDataset(tokens, lengths), dictionary.eos())
    sources = PrependTokenDataset(texts, dictionary.eos())
    targets = AppendTokenDataset(texts, dictionary.pad())

    def padded(dataset: FairseqDataset) -> PadDataset:
        return PadDataset(dataset, pad_idx=dictionary.pad(), left_pad=False)

    net_input = {"src_tokens": padded(sources), "src_lengths": NumelDataset(sources, reduce=False)}
    net_input["target"] = padded(targets)  # scoring only needs the probabilities of targets
    samples = {"id": IdDataset(), "net_input": net_input, "target": padded(targets)}
    return NestedDictionaryDataset(samples, sizes=[np.array(lengths)])
