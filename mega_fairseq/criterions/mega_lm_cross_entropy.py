"""Cross entropy of a language model, computed from the log-probabilities of the targets only."""

import math
from dataclasses import dataclass
from typing import Any, Dict, List, Tuple

from fairseq import utils
from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.dataclass import FairseqDataclass
from fairseq.logging import metrics
from fairseq.models import BaseFairseqModel
from fairseq.tasks import FairseqTask
from fairseq.tasks.translation import TranslationTask
from omegaconf import II
from torch import Tensor

from mega_fairseq.ops.smoothed_loss import smoothed_loss


@dataclass
class MegaLMCrossEntropyConfig(FairseqDataclass):
    sentence_avg: bool = II("optimization.sentence_avg")


@register_criterion("mega_lm_cross_entropy", dataclass=MegaLMCrossEntropyConfig)
class MegaLMCrossEntropy(FairseqCriterion):
    """Cross entropy for a full or an adaptive softmax, without scores for all tokens and types in memory.

    In training with a full softmax, gradients are computed together with the loss.
    """

    def __init__(self, task: FairseqTask, sentence_avg: bool):
        super().__init__(task)
        if isinstance(task, TranslationTask):
            raise ValueError(
                "--criterion mega_lm_cross_entropy is for language models, not for --task translation; choose "
                "--criterion label_smoothed_cross_entropy"
            )
        self.sentence_avg = sentence_avg

    def forward(self, model: BaseFairseqModel, sample: Dict[str, Any]) -> Tuple[Tensor, int, Dict[str, Any]]:
        if not hasattr(model.decoder, "target_log_probs"):
            raise ValueError(
                f"--criterion mega_lm_cross_entropy needs a Mega language model, not {type(model.decoder).__name__}; "
                "choose an --arch that starts with mega_lm, or --criterion cross_entropy"
            )
        target = sample["target"]
        loss = self.loss(model, sample["net_input"], target)
        sample_size = target.size(0) if self.sentence_avg else sample["ntokens"]
        logging_output = {
            "loss": loss.detach(),
            "ntokens": sample["ntokens"],
            "nsentences": target.size(0),
            "sample_size": sample_size,
        }
        return loss, sample_size, logging_output

    def loss(self, model: BaseFairseqModel, net_input: Dict[str, Any], target: Tensor) -> Tensor:
        """The sum of -log p over the targets (B, L) that are not pads."""
        decoder = model.decoder
        weights = decoder.output_weights() if decoder.training and decoder.group is None else None
        if weights is None:
            log_probs = model(**{**net_input, "target": target})[0].squeeze(-1)  # (B, L)
            return -log_probs.masked_fill(target == self.padding_idx, 0.0).sum()
        features = model(**{**net_input, "target": None, "features_only": True})[0].flatten(0, 1)  # (B L, D)
        x = decoder.before_projection(features)
        return smoothed_loss(x, *weights, target.flatten(), smoothing=0.0, pad=self.padding_idx).loss

    @staticmethod
    def reduce_metrics(logging_outputs: List[Dict[str, Any]]) -> None:
        """Log `loss` in bits per `sample_size` as fairseq does, `bits_per_token`, and the perplexity `ppl`."""
        total, tokens, size = (
            utils.item(sum(output.get(name, 0) for output in logging_outputs))
            for name in ("loss", "ntokens", "sample_size")
        )
        if not math.isfinite(total):  # fairseq checks gradients only, and validation has none
            raise FloatingPointError(
                f"the loss is {total}: training has diverged; take an earlier checkpoint, and train with a smaller --lr"
            )
        metrics.log_scalar("loss", total / size / math.log(2), size, round=4)
        metrics.log_scalar("bits_per_token", total / tokens / math.log(2), tokens, round=4)
        metrics.log_derived("ppl", lambda meters: utils.get_perplexity(meters["bits_per_token"].avg))

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        return True
