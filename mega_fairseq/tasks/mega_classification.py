"""Classification of tokens, bytes or real numbers, alone or in pairs, with the criterion `sentence_prediction`."""

import logging
from dataclasses import dataclass
from typing import Any, Dict, List, Optional

import numpy as np
from fairseq.criterions import FairseqCriterion
from fairseq.data import Dictionary
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.models import BaseFairseqModel
from fairseq.tasks import FairseqTask, register_task
from omegaconf import II
from torch import Tensor

from mega_fairseq.data.classification.examples import ExampleDataset, Shortened
from mega_fairseq.data.classification.inputs import Inputs, Scaling, byte_dictionary, tokens_of_bytes
from mega_fairseq.data.classification.labels import class_numbers
from mega_fairseq.data.classification.layouts import KINDS, DataFolder, NoData, open_folder
from mega_fairseq.data.words import check_words
from mega_fairseq.fairseq_options import option, option_of_command
from mega_fairseq.tasks.types_of_training import other_dictionary

logger = logging.getLogger(__name__)
HEAD = "sentence_classification_head"  # the default of --classification-head-name
CHOOSE = "choose --arch mega_classifier or one of its presets"


@dataclass
class MegaClassificationConfig(FairseqDataclass):
    """Options of classification."""

    data: Optional[str] = option(None, "folder with inputs and labels; docs/classification.md lists the layouts")
    input_kind: ChoiceEnum(list(KINDS)) = option("tokens", "what an input consists of")
    max_positions: int = option(0, "longest input; 0 for that of the model")
    shorten_method: ChoiceEnum(["none", "truncate"]) = option("none", "longer inputs: refuse the data, or cut them")
    init_token: Optional[int] = option(None, "token in front of each input")
    values_mean: float = option(0.0, "subtracted from values, which are in [0, 1] for bytes, in [-1, 1) for 16 bits")
    values_deviation: float = option(1.0, "values minus their mean are divided by it")
    seed: int = II("common.seed")


@register_task("mega_classification", dataclass=MegaClassificationConfig)
class MegaClassificationTask(FairseqTask):
    """Classifies tokens, bytes or real numbers, alone or in pairs.

    Checkpoints contain its state: the names of the classes in order, the tokens of a dictionary made from data, and the
    type of values. Labels of other data are matched by name. Another dictionary and values of another type are refused.
    """

    def __init__(
        self,
        cfg: MegaClassificationConfig,
        dictionary: Optional[Dictionary],
        classes: List[str],
        folder: Optional[DataFolder] = None,
    ):
        super().__init__(cfg)
        self.dictionary, self.classes = dictionary, classes
        self.folder = folder or NoData(ValueError("this task was built without data"))
        self.scaling = Scaling(cfg.values_mean, cfg.values_deviation)
        self.longest = cfg.max_positions
        self.number_type = self.folder.number_type()  # of values, which decides their scale; None until data are read
        self.length: Optional[int] = None  # of training examples that are values; None until data are read
        self.trained = False  # whether it only classifies, so that options of the training cannot change

    @classmethod
    def setup_task(
        cls, cfg: MegaClassificationConfig, from_checkpoint: bool = False, **unused: Any
    ) -> "MegaClassificationTask":
        try:
            if not cfg.data:
                raise ValueError("there is no data; give a folder with inputs and labels")
            folder = open_folder(cfg.data, str(cfg.input_kind), Scaling(cfg.values_mean, cfg.values_deviation))
        except (FileNotFoundError, ValueError) as error:
            if not from_checkpoint:  # a trained model can classify other inputs without them
                raise
            folder = NoData(error)
        dictionary = byte_dictionary() if cfg.input_kind == "bytes" else folder.dictionary()
        return cls(cfg, dictionary, folder.classes(), folder)

    # ------------------------------------------------------------------------------------------ state

    @property
    def source_dictionary(self) -> Optional[Dictionary]:
        return self.dictionary

    @property
    def target_dictionary(self) -> Optional[Dictionary]:
        return self.dictionary  # of the same text, as fairseq's task has it

    @property
    def label_dictionary(self) -> Dictionary:
        """The classes, for fairseq's criteria."""
        dictionary = Dictionary()
        for name in self.classes:
            dictionary.add_symbol(name)
        return dictionary

    def symbols(self) -> Optional[List[str]]:
        """The types of inputs of tokens, without the special ones; None for other inputs."""
        if self.dictionary is None or self.cfg.input_kind != "tokens":
            return None
        return self.dictionary.symbols[self.dictionary.nspecial :]

    def state_dict(self) -> Dict[str, Any]:
        """What a checkpoint says of the inputs and classes."""
        state = {"classes": self.classes, "symbols": self.symbols()}
        known = {"number_type": self.number_type, "length": self.length}
        return {**state, **{name: value for name, value in known.items() if value is not None}}

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        """Take the classes of a checkpoint; one that fairseq's own task wrote has none."""
        symbols = state_dict.get("symbols")
        if symbols and self.dictionary is None:
            self.dictionary = Dictionary()
            for symbol in symbols:
                self.dictionary.add_symbol(symbol)
        if symbols and symbols != self.symbols():
            raise other_dictionary(self.cfg.data)
        self.classes = state_dict.get("classes") or self.folder.unnamed_classes()
        self.length = state_dict.get("length")
        if state_dict.get("number_type"):
            self._check_type(self.number_type, str(self.cfg.data), state_dict["number_type"])

    def _check_type(self, found: Optional[str], source: str, known: Optional[str]) -> None:
        """Refuse numbers with another scale than those known before."""
        if found and known and found != known:
            raise ValueError(
                f"{source} has numbers of type {found} and the training {known}, which are scaled in other ways; "
                f"convert them to {known}"
            )
        self.number_type = known or found

    # ------------------------------------------------------------------------------------------ model

    def build_model(self, cfg: FairseqDataclass, from_checkpoint: bool = False) -> BaseFairseqModel:
        if not hasattr(cfg, "max_positions"):
            raise ValueError(f"--task mega_classification is for classifiers; {CHOOSE}")
        if self.cfg.max_positions:
            cfg.max_positions = self.cfg.max_positions
        self.longest = cfg.max_positions
        self.check_classes()
        model = super().build_model(cfg, from_checkpoint)
        # fairseq's own classifiers take tokens, and ignore a second input.
        unfit = not hasattr(model, "register_classification_head") or self.dictionary is None or self.folder.pairs()
        if unfit and not getattr(model, "takes_values_and_pairs", False):
            raise ValueError(f"{type(model).__name__} is not a classifier, or does not take values or pairs; {CHOOSE}")
        head = option_of_command(cfg, "criterion.classification_head_name", HEAD)
        model.register_classification_head(head, num_classes=len(self.classes))
        return model

    def check_classes(self) -> None:
        """Check that classes and tokens are known, from data or from a checkpoint."""
        if isinstance(self.folder, NoData):  # a converted checkpoint may lack what the release left in the data
            lacking = [
                *["names of classes"] * (not self.classes),
                *["dictionary"] * (self.dictionary is None and self.cfg.input_kind == "tokens"),
            ]
            if lacking:
                raise ValueError(f"the checkpoint has no {' and no '.join(lacking)}, and {self.folder.error}")
        first, types = self.cfg.init_token, len(self.dictionary or ())
        if first is not None and self.dictionary is None:
            raise ValueError(f"--init-token is {first} and values have no tokens; leave it out")
        if first is not None and not 0 <= first < types:
            raise ValueError(f"--init-token is {first}; give a number below {types}, the size of the dictionary")
        if len(self.classes or self.folder.unnamed_classes()) < 2:  # or an error says what is missing
            raise ValueError(
                f"the labels of training examples in {self.cfg.data} have {len(self.classes)} different values; give "
                "at least 2, or list all of them in labels.txt"
            )

    def build_criterion(self, cfg: FairseqDataclass, **options: Any) -> FairseqCriterion:
        if getattr(cfg, "_name", None) != "sentence_prediction" or cfg.regression_target:
            raise ValueError(
                "--task mega_classification predicts classes; give --criterion sentence_prediction, without "
                "--regression-target"
            )
        return super().build_criterion(cfg, **options)

    # ------------------------------------------------------------------------------------------- data

    def load_dataset(self, split: str, **unused: Any) -> None:
        labels = self.folder.labels(split)
        numbers = class_numbers(labels, self.classes, str(self.folder.labels_file(split)))
        inputs = self.folder.inputs(split)
        self.datasets[split] = self.examples(inputs, numbers)
        if split == "train" and self.cfg.input_kind == "values":
            self.length = int(inputs[0].sizes[0])

    def examples(self, inputs: List[Inputs], classes: Optional[np.ndarray] = None) -> ExampleDataset:
        """Inputs, or both inputs of pairs, as examples for the model that the task has built."""
        counts = [f"{one.source} has {len(one):,} inputs" for one in inputs]
        if classes is not None and len(classes) != len(inputs[0]) or len(inputs[0]) != len(inputs[-1]):
            labels = [] if classes is None else [f"there are {len(classes):,} labels"]
            raise ValueError(f"{' and '.join([*counts, *labels])}; give as many of each, in the same order")
        for one in inputs:
            self._check_type(one.number_type, one.source, self.number_type)
        fitted = [Shortened(one, self.longest, self.cfg.init_token) for one in inputs]
        for one in fitted:
            if one.cut and self.cfg.shorten_method == "none":
                remedy = "give a larger --max-positions, or --shorten-method truncate to cut them"
                remedy = "the model takes no more, so shorten them" if self.trained else remedy
                raise ValueError(f"{one.about_cut()}; {remedy}")
            if one.cut:
                logger.info(f"{one.about_cut()} and are cut to the first ones (--shorten-method truncate)")
        return ExampleDataset(fitted, classes, self.dictionary.pad() if self.dictionary else 0.0, self.cfg.seed)

    def count_other_lengths(self, examples: ExampleDataset) -> int:
        """How many examples have another number of values than those of the training, if that is known."""
        if self.length is None:
            return 0
        return int(np.count_nonzero(examples.inputs[0].inputs.sizes != self.length))

    def encode(self, given: Any, name: str) -> Tensor:
        """Text, bytes or an array of numbers -> the input (L,) of a model; errors call it by this name."""
        kind = self.cfg.input_kind
        if kind == "values":
            if np.ma.isMaskedArray(given):
                raise ValueError(f"{name} is a masked array; give a plain one, with a number in each place")
            numbers = np.asarray(given)
            if not numbers.size:
                raise ValueError(f"{name} is empty; leave it out")
            x = self.scaling.checked(numbers, name)
            self._check_type(self.scaling.number_type(numbers), name, self.number_type)
            return x
        if kind == "bytes" and isinstance(given, (str, bytes)):
            line = given.encode() if isinstance(given, str) else given
            x = tokens_of_bytes(np.frombuffer(line, np.uint8), self.dictionary)
        elif kind == "tokens" and isinstance(given, str):
            x = self.dictionary.encode_line(given, add_if_not_exist=False).long()
        else:
            raise TypeError(f"{name} is of type {type(given).__name__}; give str{' or bytes' * (kind == 'bytes')}")
        if x.eq(self.dictionary.pad()).any():
            raise ValueError(f"{name} has the word {self.dictionary[self.dictionary.pad()]}; remove it")
        if len(x) == 1:  # eos
            raise ValueError(f"{name} is empty; leave it out")
        check_words(x[None], self.dictionary)
        return x

    def max_positions(self) -> None:
        """No limit for fairseq, which would leave out longer inputs."""
        return None
