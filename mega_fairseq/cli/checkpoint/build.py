"""Build a checkpoint's model from the file alone, without a second copy of its tensors.

The options are not trusted: they build the model on the meta device, which allocates no memory.
"""

import textwrap
from dataclasses import fields
from types import SimpleNamespace
from typing import Any, Dict, List, Mapping, Tuple

import torch
from fairseq.data import Dictionary
from fairseq.models import MODEL_DATACLASS_REGISTRY, MODEL_REGISTRY
from torch import Tensor, nn

from mega_fairseq.cli import UserError
from mega_fairseq.cli.checkpoint.trained import WRITER, Checkpoint
from mega_fairseq.models import MegaClassifier, MegaEncoderModel, MegaLanguageModel, MegaTransformerModel
from mega_fairseq.models.embedding import types_of
from mega_fairseq.models.mega_encoder import HeadedEncoder

MODELS = (MegaLanguageModel, MegaTransformerModel, MegaClassifier, MegaEncoderModel)
PATHS = ("encoder_embed_path", "decoder_embed_path")  # files of embeddings, which the tensors replace


def stacks(model: nn.Module) -> List[Tuple[str, nn.Module]]:
    """The encoder, if there is one, and the decoder, with their names."""
    return [(side, getattr(model, side)) for side in model.STACKS]


def model_options(checkpoint: Checkpoint) -> Dict[str, Any]:
    """The checkpoint's options of its model, without files of embeddings."""
    name = checkpoint.word("model")
    if not issubclass(MODEL_REGISTRY.get(name, object), MODELS):
        raise UserError(
            f"contains the model {name}, which is not a model of mega_fairseq; give one that {WRITER} wrote"
        )
    options = {**checkpoint.cfg["model"], **dict.fromkeys(PATHS)}
    names = [field.name for field in fields(MODEL_DATACLASS_REGISTRY[name])]
    return {name: options[name] for name in names if name in options}


def empty_model(checkpoint: Checkpoint) -> nn.Module:
    """The checkpoint's model on the meta device."""
    name, options = checkpoint.word("model"), model_options(checkpoint)
    for side in MODEL_REGISTRY[name].STACKS:
        layers = options.get(f"{side}_layers", 0)
        # Each layer has tensors. Thousands of layers would take a minute and a gigabyte even on the meta device.
        if not isinstance(layers, int) or layers > len(checkpoint.tensors):
            raise invalid_options(ValueError(f"{layers!r} layers and {len(checkpoint.tensors)} tensors"))
    try:
        with torch.device("meta"):
            model = MODEL_REGISTRY[name].build_model(MODEL_DATACLASS_REGISTRY[name](**options), _task(checkpoint))
            if isinstance(model, HeadedEncoder):
                model.register_stored_heads(checkpoint.tensors)
            return model
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise invalid_options(error) from None


def _task(checkpoint: Checkpoint) -> SimpleNamespace:
    """What a model asks of its task."""
    target = types_of(checkpoint.tensors, "decoder.embed_tokens")
    source = types_of(checkpoint.tensors, "encoder.embed_tokens") or target
    if not issubclass(MODEL_REGISTRY[checkpoint.word("model")], HeadedEncoder):
        return SimpleNamespace(
            source_dictionary=_dictionary(source),
            target_dictionary=_dictionary(target),
            separators=(0, 0),  # which models of documents need
        )
    numbers = "encoder.embed_tokens.bias" in checkpoint.tensors
    words = None if numbers else _dictionary(source)
    return SimpleNamespace(source_dictionary=words, label_dictionary=None, state_dict=dict, cfg=None)


def _dictionary(types: int) -> Dictionary:
    """A dictionary with this number of types."""
    dictionary = Dictionary()
    for number in range(types - len(dictionary)):
        dictionary.add_symbol(str(number))
    return dictionary


def invalid_options(error: Exception) -> UserError:
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return UserError(f"has invalid model options ({reason}); get it again from its source")


def fill(model: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """Put the checkpoint's tensors into the model, without copying them."""
    try:
        nn.Module.load_state_dict(model, tensors, assign=True)  # fairseq's own method copies
    except RuntimeError as error:
        reason = textwrap.shorten(str(error).splitlines()[1], 160, placeholder=" ...")
        raise UserError(
            f"contains tensors that do not fit its options ({reason}), so it is damaged; get it again from its source"
        ) from None
    return model
