"""fairseq's loss of masked language models, without scores of all types for all masked tokens in memory."""

from typing import Any, Dict, Tuple

from fairseq.criterions import register_criterion
from fairseq.criterions.masked_lm import MaskedLmConfig, MaskedLmLoss
from fairseq.models import BaseFairseqModel
from torch import Tensor

from mega_fairseq.modules.classification import LanguageModelHead
from mega_fairseq.ops.smoothed_loss import smoothed_loss


@register_criterion("mega_masked_lm", dataclass=MaskedLmConfig)
class MegaMaskedLM(MaskedLmLoss):
    """The losses of `masked_lm`; with another model than Mega, this is fairseq's own computation."""

    def forward(
        self, model: BaseFairseqModel, sample: Dict[str, Any], reduce: bool = True
    ) -> Tuple[Tensor, Tensor, Dict[str, Any]]:
        head = getattr(getattr(model, "encoder", None), "lm_head", None)
        weights = head.output_weights() if isinstance(head, LanguageModelHead) else None
        if weights is None:
            return super().forward(model, sample, reduce)
        features, target = model(**sample["net_input"], features_only=True)[0], sample["target"]
        masked = target.ne(self.padding_idx)  # (B, L)
        at = masked.flatten().nonzero().squeeze(1)  # a GPU waits once for both
        x = head.before_projection(features.flatten(0, 1)[at])  # (N, D)
        loss = smoothed_loss(x, *weights, target.flatten()[at], smoothing=0.0, pad=self.padding_idx).loss
        logging_output = {
            "loss": loss.detach(),
            "ntokens": sample["ntokens"],
            "nsentences": sample["nsentences"],
            "sample_size": masked.sum(),
        }
        return loss, logging_output["sample_size"], logging_output
