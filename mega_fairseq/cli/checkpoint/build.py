"""Build the model that a checkpoint's options describe, from the file alone and without a second copy of its tensors.

The options may come from anybody, so building is limited and allocates no memory.
"""

import contextlib
from dataclasses import fields
from typing import Any, Dict, Iterator, List, Mapping, NamedTuple, Tuple

import torch
from fairseq.data import Dictionary
from fairseq.models import MODEL_DATACLASS_REGISTRY, MODEL_REGISTRY
from torch import Tensor, nn

from mega_fairseq.cli import UserError
from mega_fairseq.cli.checkpoint.trained import WRITER, Checkpoint
from mega_fairseq.models import MegaLanguageModel, MegaTransformerModel
from mega_fairseq.models.embedding import types_of

MODELS = (MegaLanguageModel, MegaTransformerModel)
SIDES = ("encoder", "decoder")
PATHS = ("encoder_embed_path", "decoder_embed_path")  # files of embeddings, which the tensors replace


class Vocabularies(NamedTuple):
    """The part of a task that these models use."""

    source_dictionary: Dictionary
    target_dictionary: Dictionary


def stacks(model: nn.Module) -> List[Tuple[str, nn.Module]]:
    """The encoder, if there is one, and the decoder, with their names."""
    return [(side, getattr(model, side)) for side in SIDES if hasattr(model, side)]


def model_options(checkpoint: Checkpoint) -> Dict[str, Any]:
    """The checkpoint's options that its model has, without files of embeddings."""
    name = checkpoint.word("model")
    if not issubclass(MODEL_REGISTRY.get(name, object), MODELS):
        raise UserError(f"contains the model {name}, which is not a Mega model; give one that {WRITER} wrote")
    given = checkpoint.cfg["model"]
    options = {field.name: given[field.name] for field in fields(MODEL_DATACLASS_REGISTRY[name]) if field.name in given}
    return {**options, **{path: None for path in PATHS if path in options}}


def empty_model(checkpoint: Checkpoint) -> nn.Module:
    """The checkpoint's model on the meta device."""
    name, options = checkpoint.word("model"), model_options(checkpoint)
    for side in SIDES:
        check_layers(options.get(f"{side}_layers", 0), len(checkpoint.tensors))
    target = types_of(checkpoint.tensors, "decoder.embed_tokens")
    source = types_of(checkpoint.tensors, "encoder.embed_tokens") or target
    with without_memory():
        cfg = MODEL_DATACLASS_REGISTRY[name](**options)
        return MODEL_REGISTRY[name].build_model(cfg, Vocabularies(dictionary(source), dictionary(target)))


def fill(model: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """Put the checkpoint's tensors into the model, without copying them."""
    try:
        nn.Module.load_state_dict(model, tensors, assign=True)  # fairseq's own method copies
    except RuntimeError:
        raise UserError("contains tensors that do not fit its options, so it is damaged; get it again") from None
    return model


def check_finite(tensors: Mapping[str, Tensor]) -> None:
    wrong = [name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()]
    if wrong:
        raise UserError(
            f"contains NaN or infinity in {len(wrong)} of {len(tensors)} tensors, the first is {wrong[0]!r}: the model "
            "has diverged; give an earlier checkpoint"
        )


def dictionary(types: int) -> Dictionary:
    """A dictionary of this length."""
    found = Dictionary()
    for number in range(types - len(found)):
        found.add_symbol(str(number))
    return found


def check_layers(layers: Any, tensors: int) -> None:
    """Each layer has tensors; a damaged file may ask for more layers than can be built."""
    if not isinstance(layers, int) or layers > tensors:
        raise UserError(f"asks for {layers!r} layers but contains {tensors} tensors; get it again from its source")


@contextlib.contextmanager
def without_memory() -> Iterator[None]:
    """Build on the meta device; raise UserError if the options do not describe a model."""
    try:
        with torch.device("meta"):
            yield
    except (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise invalid_options(error) from None


def invalid_options(error: Exception) -> UserError:
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return UserError(f"has invalid model options ({reason}); get it again from its source")
