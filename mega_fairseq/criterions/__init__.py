"""Criteria; importing this package registers them with fairseq."""

from mega_fairseq.criterions.mega_label_smoothed_cross_entropy import MegaLabelSmoothedCrossEntropy
from mega_fairseq.criterions.mega_lm_cross_entropy import MegaLMCrossEntropy
from mega_fairseq.criterions.mega_masked_lm import MegaMaskedLM
