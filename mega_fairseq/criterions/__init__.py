"""Criteria that register with fairseq when this is imported."""

from mega_fairseq.criterions.mega_lm_cross_entropy import MegaLMCrossEntropy

__all__ = ["MegaLMCrossEntropy"]
