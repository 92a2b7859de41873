"""Models; importing this package registers them with fairseq."""

import mega_fairseq.models.classifier_presets
import mega_fairseq.models.lm_presets  # noqa: F401 - register classifiers and language models
from mega_fairseq.models.mega_classifier import MegaClassifier, MegaClassifierConfig
from mega_fairseq.models.mega_lm import MegaLanguageModel, MegaLMConfig
from mega_fairseq.models.mega_transformer import MegaTransformerConfig, MegaTransformerModel

__all__ = [
    "MegaClassifier",
    "MegaClassifierConfig",
    "MegaLMConfig",
    "MegaLanguageModel",
    "MegaTransformerConfig",
    "MegaTransformerModel",
]
