"""Models; importing this package registers them with fairseq."""

import mega_fairseq.models.lm_presets  # noqa: F401 - registers language models
from mega_fairseq.models.mega_lm import MegaLanguageModel, MegaLMConfig
from mega_fairseq.models.mega_transformer import MegaTransformerConfig, MegaTransformerModel

__all__ = ["MegaLMConfig", "MegaLanguageModel", "MegaTransformerConfig", "MegaTransformerModel"]
