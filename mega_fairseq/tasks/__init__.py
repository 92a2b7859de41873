"""Tasks; importing this package registers them with fairseq."""

from mega_fairseq.tasks.mega_classification import MegaClassificationConfig, MegaClassificationTask
from mega_fairseq.tasks.mega_document_translation import MegaDocumentTranslationConfig, MegaDocumentTranslationTask
from mega_fairseq.tasks.mega_language_modeling import MegaLanguageModelingConfig, MegaLanguageModelingTask
from mega_fairseq.tasks.mega_translation import MegaTranslationConfig, MegaTranslationTask
