"""fairseq's translation task with a beam search that is faster on a GPU."""

from dataclasses import dataclass
from typing import Any, List, Optional

from fairseq.data import FairseqDataset
from fairseq.data.iterators import EpochBatchIterator
from fairseq.models import BaseFairseqModel
from fairseq.tasks import register_task
from fairseq.tasks.translation import TranslationConfig, TranslationTask

from mega_fairseq.fairseq_options import is_training
from mega_fairseq.tasks.generator import generator_class


@dataclass
class MegaTranslationConfig(TranslationConfig):
    """The options of fairseq's `translation`."""


@register_task("mega_translation", dataclass=MegaTranslationConfig)
class MegaTranslationTask(TranslationTask):
    """The same data, options, hypotheses and scores as `translation`."""

    def get_batch_iterator(self, dataset: FairseqDataset, *rest: Any, **options: Any) -> EpochBatchIterator:
        """Keep all sentences but of the training data.

        fairseq-fixed drops the last ones if their number is not a multiple of eight; with other numbers of sentences,
        training would need more graphs.
        """
        if not is_training(self.cfg) or dataset is not self.datasets.get(self.cfg.train_subset):
            options["required_batch_size_multiple"] = 1
        return super().get_batch_iterator(dataset, *rest, **options)

    def build_generator(
        self, models: List[BaseFairseqModel], args: Any, seq_gen_cls: Optional[type] = None, *rest: Any, **options: Any
    ) -> Any:
        return super().build_generator(models, args, seq_gen_cls or generator_class(args), *rest, **options)
