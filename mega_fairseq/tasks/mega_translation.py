"""fairseq's translation task with a beam search that is faster on a GPU."""

from dataclasses import dataclass
from typing import Any, Dict, List, Optional

from fairseq.data import FairseqDataset
from fairseq.data.iterators import EpochBatchIterator
from fairseq.models import BaseFairseqModel
from fairseq.tasks import register_task
from fairseq.tasks.translation import TranslationConfig, TranslationTask

from mega_fairseq.fairseq_options import is_training
from mega_fairseq.tasks.generator import generator_class
from mega_fairseq.tasks.types_of_training import check_types, state_of


@dataclass
class MegaTranslationConfig(TranslationConfig):
    """The options of fairseq's `translation`."""


@register_task("mega_translation", dataclass=MegaTranslationConfig)
class MegaTranslationTask(TranslationTask):
    """The same data, options, hypotheses and scores as `translation`."""

    def state_dict(self) -> Dict[str, Any]:
        """What a checkpoint says of the data: fairseq's entries and the types."""
        return {**super().state_dict(), **state_of(self.src_dict, self.tgt_dict)}

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        """Check the types of a trained model, unless a separator is one of them, which its model refuses."""
        super().load_state_dict(state_dict)
        if "separator" not in state_dict:
            check_types(state_dict, self.cfg.data, self.src_dict, self.tgt_dict)

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
