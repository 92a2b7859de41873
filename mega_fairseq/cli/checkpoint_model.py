"""The model of a checkpoint, from the file alone: no data, no dictionary, no second copy of its tensors."""

from dataclasses import fields
from typing import Any, Dict, List, Mapping, NamedTuple, Tuple

import torch
from fairseq.data import Dictionary
from fairseq.models import MODEL_DATACLASS_REGISTRY, MODEL_REGISTRY
from torch import Tensor, nn

from mega_fairseq.cli.checkpoint import WRITER, Checkpoint
from mega_fairseq.cli.empty_model import check_layers, dictionary, without_memory
from mega_fairseq.cli.refusal import Refusal
from mega_fairseq.models import MegaLanguageModel, MegaTransformerModel
from mega_fairseq.models.embedding import types_of

MODELS = (MegaLanguageModel, MegaTransformerModel)
SIDES = ("encoder", "decoder")
PATHS = ("encoder_embed_path", "decoder_embed_path")  # of weights that are among the tensors by now


class Vocabularies(NamedTuple):
    """All that these models ask of a task."""

    source_dictionary: Dictionary
    target_dictionary: Dictionary


def stacks(model: nn.Module) -> List[Tuple[str, nn.Module]]:
    """The encoder, where there is one, and the decoder."""
    return [(side, getattr(model, side)) for side in SIDES if hasattr(model, side)]


def options_of(checkpoint: Checkpoint) -> Dict[str, Any]:
    """Those that a model of its name has, but for files that its tensors have made superfluous."""
    name = checkpoint.word("model")
    if not issubclass(MODEL_REGISTRY.get(name, object), MODELS):
        raise Refusal(f"is of the model {name}, which is not Mega's; give one that {WRITER} wrote")
    given = checkpoint.cfg["model"]
    options = {field.name: given[field.name] for field in fields(MODEL_DATACLASS_REGISTRY[name]) if field.name in given}
    return {**options, **{path: None for path in PATHS if path in options}}


def empty_model(checkpoint: Checkpoint) -> nn.Module:
    """What the checkpoint's options describe, without memory for its tensors."""
    name, options = checkpoint.word("model"), options_of(checkpoint)
    for side in SIDES:
        check_layers(options.get(f"{side}_layers", 0), len(checkpoint.tensors))
    target = types_of(checkpoint.tensors, "decoder.embed_tokens")
    source = types_of(checkpoint.tensors, "encoder.embed_tokens") or target
    with without_memory():
        cfg = MODEL_DATACLASS_REGISTRY[name](**options)
        return MODEL_REGISTRY[name].build_model(cfg, Vocabularies(dictionary(source), dictionary(target)))


def fill(model: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """The same with the checkpoint's tensors in their places."""
    try:
        nn.Module.load_state_dict(model, tensors, assign=True)  # fairseq's own copies
    except RuntimeError:
        raise Refusal("holds tensors that do not fit its options, so it is damaged; get it again") from None
    return model


def check_finite(tensors: Mapping[str, Tensor]) -> None:
    wrong = [name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()]
    if wrong:
        raise Refusal(
            f"holds numbers that are not finite in {len(wrong)} of {len(tensors)} tensors, the first is {wrong[0]!r}: "
            "the model has diverged; take an earlier one"
        )
