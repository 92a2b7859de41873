"""The common base of all Mega models."""

import os
from argparse import SUPPRESS, ArgumentParser, ArgumentTypeError, Namespace
from dataclasses import fields
from functools import cached_property, partial
from inspect import signature
from typing import Any, Dict, Iterable, List, Tuple, Type, Union

from fairseq import hub_utils
from fairseq.dataclass import FairseqDataclass
from fairseq.dataclass.configs import GenerationConfig
from fairseq.models import BaseFairseqModel
from fairseq.tasks import FairseqTask
from torch import Tensor

from mega_fairseq.documents import split_window
from mega_fairseq.fairseq_options import all_options, check_ranges, typed
from mega_fairseq.models.options import check_unused
from mega_fairseq.models.same_model import check_names, check_overrides
from mega_fairseq.modules.config import check_positive

WITHOUT_SIDE = {"chunk_size", "token_mixer", "token_shift"}  # as options of one side are often given


class MegaModel(BaseFairseqModel):
    """A mixin for fairseq's model classes. `cfg` has the options of the model."""

    cfg: FairseqDataclass
    STACKS: Tuple[str, ...]  # "encoder", "decoder" or both
    OPTIONS: Type[FairseqDataclass]  # of `cfg`

    @cached_property
    def args(self) -> Namespace:
        """All options of the command that built the model, or of the training that saved it.

        fairseq's sentence_prediction reads them four times in each update, and resolving a config takes milliseconds.
        """
        return all_options(self.cfg)

    def train(self, mode: bool = True) -> "MegaModel":
        """Sets the mode of all modules; fairseq does so twice in each update, mostly without a change."""
        changes = any(module.training != mode for module in self.modules())
        return super().train(mode) if changes else self

    @classmethod
    def add_args(cls, parser: ArgumentParser) -> None:
        """Adds the options to a command line; a name without a side is refused with those of each side."""
        super().add_args(parser)
        for name in WITHOUT_SIDE.difference(f.name for f in fields(cls.OPTIONS)):
            named = " or ".join(typed(f"{side}_{name}") for side in cls.STACKS)
            parser.add_argument(typed(name), type=partial(_refuse, named), default=SUPPRESS, help=SUPPRESS)

    @classmethod
    def check_options(cls, cfg: FairseqDataclass, task: FairseqTask) -> None:
        """Checks the options before anything is built, and applies --model-overrides."""
        check_overrides(cfg, cls.OPTIONS, task)
        check_ranges(cfg, cls.OPTIONS)
        check_unused(cfg, cls.STACKS)

    def upgrade_state_dict_named(self, state_dict: Dict[str, Tensor], name: str) -> None:
        """Fits a checkpoint to the chunk sizes and longest sequences of this model."""
        super().upgrade_state_dict_named(state_dict, name)
        for side in self.STACKS:
            for number, layer in enumerate(getattr(self, side).layers):
                layer.adapt(state_dict, f"{side}.layers.{number}.")

    @classmethod
    def from_pretrained(
        cls,
        model_name_or_path: Union[str, os.PathLike],
        checkpoint_file: Union[str, os.PathLike] = "model.pt",
        data_name_or_path: Union[str, os.PathLike] = ".",
        **options: Any,
    ) -> hub_utils.GeneratorHubInterface:
        """Loads a trained model with its task, to translate, continue or score text; see fairseq's documentation.

        It refuses unknown `options`, and those of the model that must be as in training.
        """
        folder, checkpoints, data = map(os.fspath, (model_name_or_path, checkpoint_file, data_name_or_path))
        if "://" not in folder and not os.path.exists(folder):  # fairseq would take it for the name of a model
            raise FileNotFoundError(f"there is no {folder}; give a folder of checkpoints")
        if data != "." and os.path.exists(data):  # fairseq would look for ./data beside the checkpoint
            data = os.path.abspath(data)
        loaded = hub_utils.from_pretrained(folder, checkpoints, data, **options)
        model = loaded["models"][0]
        if not isinstance(model, cls):
            kind = type(model).__name__
            raise ValueError(f"{checkpoint_file} contains a {kind}, not a {cls.__name__}; call {kind}.from_pretrained")
        names = (name for name in options if name != "generation_args")
        check_names("from_pretrained has", names, model.cfg, cls.OPTIONS)
        return cls.interface(loaded["args"], loaded["task"], loaded["models"])

    @classmethod
    def interface(cls, cfg: Any, task: FairseqTask, models: List[BaseFairseqModel]) -> hub_utils.GeneratorHubInterface:
        """What `from_pretrained` returns."""
        return MegaHub(cfg, task, models)


def _refuse(named: str, value: str) -> None:
    raise ArgumentTypeError(f"give {named}")


class MegaHub(hub_utils.GeneratorHubInterface):
    """fairseq's interface, which also checks options, leaves blank sentences blank and translates documents."""

    def generate(self, tokenized_sentences: Any, beam: int = 5, *args: Any, **kwargs: Any) -> Any:
        check_positive(beam=beam)
        called = signature(super().generate)
        known = {f.name for f in fields(GenerationConfig)} | called.parameters.keys()
        for name in kwargs.keys() - known:
            raise ValueError(f"generate has no option {name!r}; give those of fairseq-generate, such as max_len_b")
        given = called.bind(tokenized_sentences, beam, *args, **kwargs).arguments
        if given.get("skip_invalid_size_inputs"):  # then the results after one would belong to other inputs
            raise ValueError("skip_invalid_size_inputs would leave results out; shorten or remove inputs instead")
        return super().generate(tokenized_sentences, beam, *args, **kwargs)

    def translate(self, sentences: Any, beam: int = 5, verbose: bool = False, **options: Any) -> Any:
        """Translates sentences, or one. Blank ones stay blank, for which a search would invent translations."""
        if isinstance(sentences, str):
            return self.translate([sentences], beam, verbose, **options)[0]
        filled = [sentence for sentence in sentences if sentence.strip()]
        found = iter(super().translate(filled, beam, verbose, **options) if filled else ())
        return [next(found) if sentence.strip() else "" for sentence in sentences]

    def translate_documents(self, documents: Iterable[Iterable[str]], beam: int = 5, **options: Any) -> List[List[str]]:
        """Translates documents of any length, by windows as in tests; each has as many lines as before.

        `options` are those of `translate`. Blank lines stay blank.
        """
        if getattr(self.task.cfg, "sentence_counts", None) != "exact":
            raise ValueError(
                "translate_documents is for models of --task mega_document_translation with --sentence-counts exact; "
                "call translate, or train such a model"
            )
        documents = [documents] if isinstance(documents, str) else list(documents)
        if any(isinstance(document, str) for document in documents):
            raise TypeError("a document is a single text; give a list of documents, each a list of lines")
        encoded = [[self.encode(line) for line in document] for document in documents]
        windows = self.task.windows([[line for line in document if len(line) > 1] for document in encoded])
        hypotheses = self.generate(windows, beam, **options) if windows else []
        texts = (self.string(each[0]["tokens"]) for each in hypotheses)
        found = iter([line for text in texts for line in split_window(text, self.task.cfg.separator)])
        return [
            [self.detokenize(self.remove_bpe(next(found))) if len(line) > 1 else "" for line in document]
            for document in encoded
        ]
