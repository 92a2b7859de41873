"""Reads what torch.save wrote, and executes nothing that stands in it: a checkpoint may come from anybody."""

import argparse
import codecs
import contextlib
import pickle
import re
import reprlib
from typing import Any, BinaryIO, Dict, Iterator, List, Tuple, Union

import numpy as np
import torch
from torch import Tensor

from mega_fairseq.cli.refusal import Refusal

Global = Union[type, Tuple[Any, str]]


def takes_names() -> bool:
    """Whether torch can be told to trust an object under another name than its own, as since 2.6."""
    return hasattr(torch.serialization, "get_unsafe_globals_in_checkpoint")


def load(path: str, writer: str) -> Any:
    """The tensors and plain containers in the file at `path`; refuses what `writer` does not write."""
    try:
        with open(path, "rb") as file:
            return _plain_content(file, writer)
    except OSError as error:
        raise Refusal(f"cannot be read ({error.strerror}); give the path of a checkpoint") from None


def _plain_content(file: BinaryIO, writer: str) -> Any:
    try:
        with _trusting(_plain_containers()):
            return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        asked_for = re.search(r"(?:GLOBAL|function|class) ([\w.]+\.[\w.]+)", str(error))
        if asked_for is None:
            raise _damaged() from None
        raise Refusal(
            f"asks for {asked_for.group(1)}, which no checkpoint of {writer} needs, and was not executed; "
            f"give a file that {writer} wrote"
        ) from None
    except Exception:
        raise _damaged() from None


def tensors_of(content: Any, writer: str) -> Dict[str, Tensor]:
    """The state dict of the model that a checkpoint holds, each tensor of it a whole one."""
    if not isinstance(content, dict) or not isinstance(content.get("model"), dict):
        raise Refusal(f"holds no model, so it is no checkpoint of fairseq; give one that {writer} wrote")
    tensors = content["model"]
    for name, tensor in tensors.items():
        if not (isinstance(name, str) and isinstance(tensor, Tensor) and _is_stored(tensor)):
            raise Refusal(
                f"holds in place of {reprlib.repr(name)} what is no tensor of a model; get it again from its source"
            )
    return dict(tensors)


@contextlib.contextmanager
def _trusting(allowed: List[Global]) -> Iterator[None]:
    """Lets torch.load make these and nothing else, whatever the process has it trust at other times."""
    before = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals(allowed)
    try:
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)


def _plain_containers() -> List[Global]:
    """What training adds to torch's own: options in a Namespace, where fairseq has no dataclass for them, and BLEU
    counts of the log in numpy arrays, under their old or new module."""
    functions = {"_reconstruct": np.zeros(1).__reduce__()[0], "scalar": np.float64().__reduce__()[0]}
    dtypes = [type(np.dtype(name)) for name in ("float64", "float32", "int64", "int32", "bool")]
    allowed: List[Global] = [argparse.Namespace, np.ndarray, np.dtype, *dtypes]
    if not takes_names():
        return [*allowed, *functions.values(), codecs.encode]  # the last is how pickle spells bytes
    cores = ("core", "_core")
    return [*allowed, *((f, f"numpy.{core}.multiarray.{name}") for core in cores for name, f in functions.items())]


def _damaged() -> Refusal:
    return Refusal("is no checkpoint, or only a part of one; copy or download it again")


def _is_stored(tensor: Tensor) -> bool:
    """With a number for each entry, not sparse, not empty or a mere shape, not one number seen as many."""
    if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
        return False
    return 0 < tensor.numel() * tensor.element_size() <= tensor.untyped_storage().nbytes()
