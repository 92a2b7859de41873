"""Golden translation models, language models and classifiers: our models with the released weights, and beam search."""

from argparse import Namespace
from typing import Any, Dict, List, Optional

import torch
from fairseq.data import Dictionary
from fairseq.sequence_generator import SequenceGenerator
from torch import Tensor

from mega_fairseq.cli.checkpoint.build import empty_model, fill
from mega_fairseq.cli.checkpoint.trained import Checkpoint
from mega_fairseq.cli.convert.command import convert
from mega_fairseq.models import MegaTransformerModel
from tests.helpers import released
from tests.helpers.golden_cases import Case

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
    return Namespace(source_dictionary=words, label_dictionary=None, state_dict=dict, cfg=None, get_batch_iterator=None)


def model(case: Case, truncated: bool = True, **changes: Any) -> Any:
    """The model of a case in eval mode, as `mega-fairseq convert` makes it; `changes` replace some of its options.

    The release truncates the EMA of a decoder in a full pass only. A converted decoder does not, unless `truncated`.
    """
    content = released.checkpoint(case)
    state, _ = convert(vars(content["args"]), {name: tensor.clone() for name, tensor in content["model"].items()})
    if truncated and case.kind != "classifier":
        changes["decoder_truncation_length"] = case.config["truncation_length"]
    cfg = {**state["cfg"], "model": {**state["cfg"]["model"], **changes}}
    return fill(empty_model(Checkpoint(cfg, state["model"])), state["model"]).eval()


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
