"""Warns in validation if a translation model does not use its sources: its translations are then all alike."""

import logging
import math

from fairseq.models import FairseqEncoderDecoderModel
from torch import Tensor

logger = logging.getLogger(__name__)

EARLY = 400  # updates in which models that learn may still ignore their sources
LEAST = 0.05  # bits per token; the README's translator has 0.001 after 100 updates, 0.24 after 200 and 1.1 after 300


class SourceUse:
    """Compares the loss of a batch with that if each source has the translation of another one.

    It needs neither a search nor a task or criterion of ours, so every training with fairseq's commands has it.
    """

    def __init__(self) -> None:
        self.updates = 0  # of this training
        self.checked = 0  # updates at the last check

    def check(self, model: FairseqEncoderDecoderModel, sources: Tensor, lengths: Tensor, targets: Tensor) -> None:
        """Checks the first batch of each validation that has different sources."""
        if self.updates <= EARLY or self.updates == self.checked:
            return
        others = sources.roll(1, 0)
        rows = sources.ne(others).any(1)
        if not rows.any():
            return
        self.checked = self.updates
        own, exchanged = (
            bits(model, tokens, counts, targets)[rows].sum()
            for tokens, counts in ((sources, lengths), (others, lengths.roll(1, 0)))
        )
        gain = float((exchanged - own) / targets[rows, 1:].ne(model.decoder.dictionary.pad()).sum())
        if gain < LEAST:
            logger.warning(
                "after %s updates, the model hardly uses its sources, so its translations are all alike: with the "
                "source of another sentence, the loss per token is higher by only %.3f bits; if this does not change "
                "soon, train anew with a smaller --lr or more --warmup-updates",
                f"{self.updates:,}",
                gain,
            )


def bits(model: FairseqEncoderDecoderModel, sources: Tensor, lengths: Tensor, targets: Tensor) -> Tensor:
    """Of each sentence, without its first and its last token; targets (B, L) start with eos."""
    output = model.decoder(targets, encoder_out=model.encoder(sources, src_lengths=lengths))
    following = targets[:, 1:]
    log_probs = model.get_normalized_probs(output, log_probs=True)[:, :-1]
    lost = -log_probs.gather(2, following.unsqueeze(2)).squeeze(2).float()
    return lost.masked_fill(following.eq(model.decoder.dictionary.pad()), 0.0).sum(1) / math.log(2)
