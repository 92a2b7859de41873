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
from mega_fairseq.models.checkpoints import DTYPES, numpy_functions, takes_names

Global = Union[type, Tuple[Any, str]]


def load(path: str, writer: str) -> Any:
    """The tensors and plain containers in the file at `path`; refuses what `writer` does not write."""
    try:
        with open(path, "rb") as file:
            return _plain_content(file, writer)
    except OSError as error:
        raise Refusal(f"cannot be read ({error.strerror}); give the path of a checkpoint") from None


def _plain_content(file: BinaryIO, writer: str) -> Any:
    if _is_program(file):
        raise Refusal(f"is a TorchScript program and was not executed; give a checkpoint that {writer} wrote")
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


def _is_program(file: BinaryIO) -> bool:
    """torch before 2.6 hands TorchScript to its interpreter even where it is to read weights only (CVE-2025-32434)."""
    try:
        return "constants.pkl" in torch._C.PyTorchFileReader(file).get_all_records()
    except (OSError, RuntimeError):  # no archive
        return False
    finally:
        file.seek(0)


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


class _Unread:
    """Stands for numpy's arrays, which hold BLEU counts of the log: nothing here asks for them, and their pickles could
    make numpy take any bytes for objects."""

    def __init__(self, *arguments: Any):
        pass

    def __setstate__(self, state: Any) -> None:
        pass


def _plain_containers() -> List[Global]:
    """What training adds to torch's own: arrays, and options in a Namespace where fairseq has no dataclass for them."""
    if not takes_names():
        dtypes = [type(np.dtype(name)) for name in DTYPES]
        functions = [function for function, _ in numpy_functions()]
        return [argparse.Namespace, np.ndarray, np.dtype, *dtypes, *functions, codecs.encode]  # pickle's way with bytes
    names = ["numpy.ndarray", "numpy.dtype", *(name for _, name in numpy_functions())]
    return [argparse.Namespace, *((_Unread, name) for name in names)]


def _damaged() -> Refusal:
    return Refusal("is no checkpoint, or only a part of one; copy or download it again")


def _is_stored(tensor: Tensor) -> bool:
    """With a number for each entry, not sparse, not empty or a mere shape, not one number seen as many."""
    if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
        return False
    return 0 < tensor.numel() * tensor.element_size() <= tensor.untyped_storage().nbytes()
