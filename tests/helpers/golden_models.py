"""Golden translation models, language models and classifiers: our models with the released weights, and beam search."""

import re
from argparse import Namespace
from dataclasses import fields
from typing import Any, Dict, List, Optional, Type

import torch
from fairseq.data import Dictionary
from fairseq.sequence_generator import SequenceGenerator
from torch import Tensor

from mega_fairseq.cli.convert.families import CLASSIFICATION
from mega_fairseq.cli.convert.names import HEAD
from mega_fairseq.models import (
    MegaClassifier,
    MegaClassifierConfig,
    MegaLanguageModel,
    MegaLMConfig,
    MegaTransformerConfig,
    MegaTransformerModel,
)
from mega_fairseq.models.options import StackOptions
from tests.helpers.golden_cases import Case, state_dict

PAD = 1


def dictionary(size: int) -> Dictionary:
    """A dictionary of this size: bos 0, pad 1, eos 2, unk 3, then words."""
    words = Dictionary()
    for index in range(size - len(words)):
        words.add_symbol(f"w{index}")
    return words


def task(types: int) -> Namespace:
    """A task with one dictionary of this size."""
    words = dictionary(types)
    return Namespace(source_dictionary=words, target_dictionary=words)


def classification(types: Optional[int]) -> Namespace:
    """A task with a dictionary of this size for its inputs, or without one for real numbers."""
    words = None if types is None else dictionary(types)
    return Namespace(source_dictionary=words, label_dictionary=None, state_dict=dict)


def options(case: Case, kind: Type[StackOptions], **changes: Any) -> StackOptions:
    """Our options from the released options of a case; `changes` replace some."""
    known = {f.name for f in fields(kind)}
    recorded = {name: value for name, value in case.config.items() if name in known}
    return kind(**{**recorded, **changes})


def translation_model(case: Case, **changes: Any) -> MegaTransformerModel:
    """The model of a case in eval mode."""
    types = case.parameters["encoder.embed_tokens.weight"].size(0)
    model = MegaTransformerModel.build_model(options(case, MegaTransformerConfig, **changes), task(types))
    model.load_state_dict(complete(state_dict(case), model))
    return model.eval()


def language_model(case: Case, **changes: Any) -> MegaLanguageModel:
    """The model of a case in eval mode."""
    model = MegaLanguageModel.build_model(options(case, MegaLMConfig, **changes), task(types(case)))
    model.load_state_dict(complete(state_dict(case), model))
    return model.eval()


def classifier(case: Case, **changes: Any) -> MegaClassifier:
    """The model of a case in eval mode."""
    recorded = CLASSIFICATION.model_options(case.config, [f.name for f in fields(MegaClassifierConfig)])
    cfg = MegaClassifierConfig(**{**recorded, "pairs": "src_tokens1" in case.inputs, **changes})
    model = MegaClassifier.build_model(cfg, classification(case.config["vocabulary"]))
    model.register_classification_head(HEAD.rpartition(".")[2], case.config["sentence_class_num"])
    model.load_state_dict(state_dict(case))
    return model.eval()


def types(case: Case) -> int:
    """Size of a language model's dictionary, summed over the bands of an adaptive input."""
    table = re.compile(r"decoder\.embed_tokens\.(embeddings\.\d+\.0\.)?weight")
    return sum(tensor.size(0) for name, tensor in case.parameters.items() if table.fullmatch(name))


def complete(state: Dict[str, Tensor], model: torch.nn.Module) -> Dict[str, Tensor]:
    """The released state with the model's names, since the release may store a tied tensor once or twice."""
    return {name: state[name] for name in model.state_dict()}


def inputs(case: Case, row: Optional[int] = None) -> Dict[str, Tensor]:
    """Arguments of forward: the whole batch, or one sentence without its pads."""
    if row is None:
        return {name: case.inputs[name] for name in ("src_tokens", "src_lengths", "prev_output_tokens")}
    source, target = (case.inputs[name][row] for name in ("src_tokens", "prev_output_tokens"))
    source, target = source[source != PAD], target[target != PAD]
    lengths = torch.tensor([source.numel()])
    return {"src_tokens": source[None], "src_lengths": lengths, "prev_output_tokens": target[None]}


def search(model: MegaTransformerModel, net_input: Dict[str, Tensor], beam: int, **options: Any) -> List[List[dict]]:
    """Beam search as the cases were recorded: up to 20 tokens, scores divided by length."""
    generator = SequenceGenerator(
        [model], model.decoder.dictionary, beam_size=beam, max_len_a=0, max_len_b=20, **options
    )
    return generator.generate([model], {"net_input": net_input})
