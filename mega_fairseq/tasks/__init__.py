"""Tasks; importing this package registers them with fairseq."""

from mega_fairseq.tasks.mega_classification import MegaClassificationConfig, MegaClassificationTask
from mega_fairseq.tasks.mega_language_modeling import MegaLanguageModelingConfig, MegaLanguageModelingTask

__all__ = [
    "MegaClassificationConfig",
    "MegaClassificationTask",
    "MegaLanguageModelingConfig",
    "MegaLanguageModelingTask",
]
