"""Models that register with fairseq when this is imported: by `--user-dir`, or by hand in a program of your own."""

from mega_fairseq.models.checkpoints import allow_plain_containers
from mega_fairseq.models.mega_lm import MegaLanguageModel, MegaLMConfig
from mega_fairseq.models.mega_transformer import MegaTransformerConfig, MegaTransformerModel

allow_plain_containers()

__all__ = ["MegaLMConfig", "MegaLanguageModel", "MegaTransformerConfig", "MegaTransformerModel"]
