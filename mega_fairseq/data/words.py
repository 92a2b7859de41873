"""Warns of text that a model cannot read, for which it would give a fluent answer."""

import logging
from typing import Set

from fairseq.data import Dictionary
from torch import Tensor

logger = logging.getLogger(__name__)
UNKNOWN, BLANK = 1, 2
warned: Set[int] = set()


def check_words(tokens: Tensor, dictionary: Dictionary, can_be_blank: bool = True) -> None:
    """Warns once of texts (B, L) that are mostly unknown, as without segmentation, and once of blank ones.

    Waits for the device once, and no more after these warnings.
    """
    if UNKNOWN in warned and (can_be_blank or BLANK in warned):
        return
    words = tokens.ne(dictionary.pad()) & tokens.ne(dictionary.eos())
    unknown = 2 * tokens.eq(dictionary.unk()).sum() >= words.sum().clamp(min=1)
    blank = ~words.any(1).all()
    found = int(UNKNOWN * unknown + BLANK * blank)
    if found & UNKNOWN and UNKNOWN not in warned:
        warned.add(UNKNOWN)
        logger.warning(
            f"most words of an input are unknown ({dictionary.unk_string()}), so the answer is a guess; segment inputs "
            "as in the training (fairseq-interactive and from_pretrained: with --bpe)"
        )
    if found & BLANK and not can_be_blank and BLANK not in warned:
        warned.add(BLANK)
        logger.warning("an input is blank, so its translation is a guess; leave blank lines out")
