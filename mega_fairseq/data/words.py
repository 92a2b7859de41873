"""Warns of text that a model cannot read, for which it would give a fluent answer."""

import logging
from functools import lru_cache

from fairseq.data import Dictionary
from torch import Tensor

warn_once = lru_cache(maxsize=None)(logging.getLogger(__name__).warning)


def check_words(tokens: Tensor, dictionary: Dictionary, can_be_blank: bool = True) -> None:
    """Warns once of texts (B, L) that are mostly unknown, as without segmentation, and once of blank ones."""
    words = tokens.ne(dictionary.pad()) & tokens.ne(dictionary.eos())
    if 2 * tokens.eq(dictionary.unk()).sum() >= words.sum().clamp(min=1):
        warn_once(
            f"most words of an input are unknown ({dictionary.unk_string()}), so the answer is a guess; segment inputs "
            "as in the training (fairseq-interactive and from_pretrained: with --bpe)"
        )
    if not (can_be_blank or words.any(1).all()):
        warn_once("an input is blank, so its translation is a guess; leave blank lines out")
