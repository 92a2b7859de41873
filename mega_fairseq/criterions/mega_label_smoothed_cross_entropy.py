"""fairseq's label-smoothed cross entropy, without scores of all types for all tokens in memory."""

from typing import Any, Dict, Optional, Tuple

from fairseq.criterions import register_criterion
from fairseq.criterions.label_smoothed_cross_entropy import (
    LabelSmoothedCrossEntropyCriterion,
    LabelSmoothedCrossEntropyCriterionConfig,
)
from fairseq.models import BaseFairseqModel
from torch import Tensor, nn

from mega_fairseq.modules.projection import plain_weights
from mega_fairseq.ops.gates.projection import Weights
from mega_fairseq.ops.smoothed_loss import smoothed_loss


@register_criterion("mega_label_smoothed_cross_entropy", dataclass=LabelSmoothedCrossEntropyCriterionConfig)
class MegaLabelSmoothedCrossEntropy(LabelSmoothedCrossEntropyCriterion):
    """The losses and options of `label_smoothed_cross_entropy`, for Mega and for fairseq's Transformer.

    The output layer must be a matrix that may be read: with hooks on it, adapters or quantised weights, this is
    fairseq's own computation.
    """

    def forward(
        self, model: BaseFairseqModel, sample: Dict[str, Any], reduce: bool = True
    ) -> Tuple[Tensor, int, Dict[str, Any]]:
        weights = output_weights(getattr(model, "decoder", None))
        if weights is None or not reduce:
            return super().forward(model, sample, reduce)
        net_output = model(**sample["net_input"], features_only=True)
        first, target = self.ignore_prefix_size, model.get_targets(sample, net_output)
        features, target = net_output[0][:, first:].flatten(0, 1), target[:, first:].flatten()
        if hasattr(model.decoder, "before_projection"):
            features = model.decoder.before_projection(features)
        found = smoothed_loss(features, *weights, target, self.eps, self.padding_idx, self.report_accuracy)
        sample_size = sample["target"].size(0) if self.sentence_avg else sample["ntokens"]
        logging_output = {
            "loss": found.loss.detach(),
            "nll_loss": found.nll_loss,
            "ntokens": sample["ntokens"],
            "nsentences": sample["target"].size(0),
            "sample_size": sample_size,
        }
        if self.report_accuracy:
            logging_output.update(n_correct=found.correct, total=target.ne(self.padding_idx).sum())
        return found.loss, sample_size, logging_output


def output_weights(decoder: Optional[nn.Module]) -> Optional[Weights]:
    """The weight (V, D) and bias of the output layer of Mega's decoder or fairseq's, or None."""
    if hasattr(decoder, "output_weights"):
        return decoder.output_weights()
    if getattr(decoder, "adaptive_softmax", None) is not None:
        return None
    return plain_weights(getattr(decoder, "output_projection", None))
