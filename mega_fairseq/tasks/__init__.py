"""Tasks that register with fairseq when this is imported."""

from mega_fairseq.tasks.mega_language_modeling import MegaLanguageModelingConfig, MegaLanguageModelingTask

__all__ = ["MegaLanguageModelingConfig", "MegaLanguageModelingTask"]
