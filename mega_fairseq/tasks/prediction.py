"""Predictions of trained classifiers for new inputs."""

import logging
from typing import Any, Dict, Iterable, List, NamedTuple, Sequence

import numpy as np
import torch
from fairseq.models import BaseFairseqModel
from fairseq.tasks import FairseqTask
from fairseq.utils import apply_to_sample
from torch import Tensor, nn
from tqdm import tqdm

from mega_fairseq.data.classification.examples import ExampleDataset
from mega_fairseq.data.classification.inputs import InMemory
from mega_fairseq.data.classification.labels import classes_of
from mega_fairseq.modules.config import check_positive
from mega_fairseq.tasks.mega_classification import MegaClassificationConfig, MegaClassificationTask

logger = logging.getLogger(__name__)


class Prediction(NamedTuple):
    label: str  # of the most probable class
    probability: float
    probabilities: Dict[str, float]  # of all classes by label


class Classifier(nn.Module):
    """Trained models with their task, as `MegaClassifier.from_pretrained` returns them."""

    def __init__(self, task: FairseqTask, models: Sequence[BaseFairseqModel]):
        super().__init__()
        self.task = task if isinstance(task, MegaClassificationTask) else _in_place_of(task)
        self.models = nn.ModuleList(models).eval()
        self.task.longest = min(model.cfg.max_positions for model in models)
        self.task.trained = True

    @property
    def labels(self) -> List[str]:
        return list(self.task.classes)

    def predict(self, inputs: Iterable[Any], batch_size: int = 16) -> List[Prediction]:
        """Classify inputs: text, bytes, or arrays of numbers as in the files of the training; pairs are tuples of two.

        Several models are averaged.
        """
        examples = self.examples(inputs)
        others = self.task.count_other_lengths(examples)
        if others:
            logger.warning(
                "%d of %d inputs have more or fewer values than the %d of training examples, so predictions may be "
                "wrong; give as many",
                others,
                len(examples),
                self.task.length,
            )
        return [self.prediction(row) for row in self.probabilities(examples, batch_size)]

    def examples(self, inputs: Iterable[Any]) -> ExampleDataset:
        """Inputs as `predict` takes them, if the model can classify them."""
        return self.task.examples(self._inputs(inputs))

    def prediction(self, probabilities: Tensor) -> Prediction:
        """(classes,) -> the prediction."""
        best = int(probabilities.argmax())
        return Prediction(self.labels[best], float(probabilities[best]), dict(zip(self.labels, probabilities.tolist())))

    @torch.no_grad()
    def probabilities(self, examples: ExampleDataset, batch_size: int = 16, progress: bool = False) -> Tensor:
        """The probabilities (N, classes) of examples; with `progress`, a terminal shows how many are done."""
        check_positive(batch_size=batch_size)
        order = np.argsort(-examples.sizes, kind="stable")  # inputs of similar length need few pads
        device, result = next(self.parameters()).device, torch.zeros(len(examples), len(self.labels))
        starts = range(0, len(order), batch_size)
        for start in tqdm(starts, unit="example", unit_scale=batch_size, disable=None if progress else True):
            rows = order[start : start + batch_size].tolist()
            net_input = examples.collater([examples[row] for row in rows])["net_input"]
            net_input = apply_to_sample(lambda t: t.to(device), net_input)
            scores = torch.stack([self.scores(model, net_input) for model in self.models])
            found = scores.float().softmax(-1).mean(0).cpu()
            finite = found.isfinite().all(1).tolist()
            if not all(finite):
                number = rows[finite.index(False)] + 1
                raise ValueError(
                    f"the probabilities of example {number} are not finite (NaN): its numbers are too large, or the "
                    "training has diverged; remove the example, or take an earlier checkpoint"
                )
            result[rows] = found
        return result

    @staticmethod
    def scores(model: BaseFairseqModel, net_input: Dict[str, Tensor]) -> Tensor:
        """The scores (B, classes) of a model's only head."""
        (head,) = model.classification_heads
        return model(**net_input, features_only=True, classification_head_name=head)[0]

    def _inputs(self, inputs: Iterable[Any]) -> List[InMemory]:
        if isinstance(inputs, (str, bytes)):
            raise TypeError("the inputs are a single text; give a list of inputs")
        inputs = list(inputs)
        if not self.models[0].pairs:
            return [self._given(inputs)]
        if not all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in inputs):
            raise ValueError("this model classifies pairs; give tuples of two inputs")
        return [self._given([pair[i] for pair in inputs], f"part {i + 1} of ") for i in (0, 1)]

    def _given(self, inputs: Iterable[Any], part: str = "") -> InMemory:
        return InMemory([self.task.encode(one, f"{part}input {number}") for number, one in enumerate(inputs, 1)])


def _in_place_of(task: FairseqTask) -> MegaClassificationTask:
    """Our task with the options, tokens and classes of fairseq's `sentence_prediction`."""
    given = {name: getattr(task.cfg, name) for name in ("init_token", "max_positions", "shorten_method")}
    classes = [name for name in classes_of(task.label_dictionary) if name != "<mask>"]  # which that task adds
    return MegaClassificationTask(MegaClassificationConfig(**given), task.dictionary, classes)
