"""A model as a checkpoint describes it, without memory for its tensors; what describes it may come from anybody."""

import contextlib
from typing import Any, Iterator

import torch
from fairseq.data import Dictionary

from mega_fairseq.cli.refusal import Refusal


def dictionary(types: int) -> Dictionary:
    """As long as the one that the model was trained with."""
    found = Dictionary()
    for number in range(types - len(found)):
        found.add_symbol(str(number))
    return found


def check_layers(layers: Any, tensors: int) -> None:
    """A file may ask for more of them than could ever be built."""
    if not isinstance(layers, int) or layers > tensors:
        raise Refusal(f"asks for {layers!r} layers and holds {tensors} tensors; get it again from its source")


@contextlib.contextmanager
def without_memory() -> Iterator[None]:
    """What is built within has shapes alone, and what cannot be built is refused."""
    try:
        with torch.device("meta"):
            yield
    except (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise no_model(error) from None


def no_model(error: Exception) -> Refusal:
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return Refusal(f"has options that make no model ({reason}); get it again from its source")
