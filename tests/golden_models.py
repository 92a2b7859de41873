"""Whole golden models: the released translation and language models as models of ours, and beam search over them."""

import re
from argparse import Namespace
from dataclasses import fields
from typing import Any, Dict, List, Optional, Type

import torch
from fairseq.data import Dictionary
from fairseq.sequence_generator import SequenceGenerator
from torch import Tensor

from mega_fairseq.models import MegaLanguageModel, MegaLMConfig, MegaTransformerConfig, MegaTransformerModel
from mega_fairseq.models.options import MegaOptions
from tests.golden_cases import Case, state_dict

PAD = 1


def dictionary(size: int) -> Dictionary:
    """bos 0, pad 1, eos 2, unk 3 and as many words as make up `size`."""
    words = Dictionary()
    for index in range(size - len(words)):
        words.add_symbol(f"w{index}")
    return words


def options(case: Case, kind: Type[MegaOptions], **changes: Any) -> MegaOptions:
    """The options that a case was recorded with, under the released names, as options of ours."""
    known = {f.name for f in fields(kind)}
    recorded = {name: value for name, value in case.config.items() if name in known}
    return kind(**{**recorded, **changes})


def translation_model(case: Case, **changes: Any) -> MegaTransformerModel:
    """The model of a case in eval mode."""
    words = dictionary(case.parameters["encoder.embed_tokens.weight"].size(0))
    task = Namespace(source_dictionary=words, target_dictionary=words)
    model = MegaTransformerModel.build_model(options(case, MegaTransformerConfig, **changes), task)
    model.load_state_dict(complete(state_dict(case), model))
    return model.eval()


def language_model(case: Case, **changes: Any) -> MegaLanguageModel:
    """The model of a case in eval mode."""
    words = dictionary(types(case))
    task = Namespace(source_dictionary=words, target_dictionary=words)
    model = MegaLanguageModel.build_model(options(case, MegaLMConfig, **changes), task)
    model.load_state_dict(complete(state_dict(case), model))
    return model.eval()


def types(case: Case) -> int:
    """How many types a language model knows, in one table or in one for each band."""
    table = re.compile(r"decoder\.embed_tokens\.(embeddings\.\d+\.0\.)?weight")
    return sum(tensor.size(0) for name, tensor in case.parameters.items() if table.fullmatch(name))


def complete(state: Dict[str, Tensor], model: torch.nn.Module) -> Dict[str, Tensor]:
    """A released state may name a tied tensor twice or once; ours names what the model names."""
    return {name: state[name] for name in model.state_dict()}


def inputs(case: Case, row: Optional[int] = None) -> Dict[str, Tensor]:
    """What a model's forward takes: the whole batch, or one sentence of it without its pads."""
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
