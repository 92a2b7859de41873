"""Globals that a checkpoint may contain when torch reads weights only, which is its default since version 2.6.

Checkpoints of this package contain tensors and plain containers. Those of stock models (a Transformer to compare with
or a teacher), runs with --eval-bleu and the data that fairseq broadcasts to other processes when it resumes also
contain the classes below, which are plain data. They are added to torch's allow-list; fairseq is not changed.

Nothing of numpy is allowed: with a forged dtype, it takes any bytes for the addresses of objects. Arrays and numbers
are made by classes here, which torch finds under numpy's names.
"""

import argparse
import codecs
import collections
import typing
from pickle import UnpicklingError
from typing import Any, List

import numpy as np
import omegaconf
import torch
from fairseq.distributed.utils import _TensorPlaceholder

DTYPES = {"f8": np.float64, "f4": np.float32, "i8": np.int64}
CORES = ("numpy.core.multiarray", "numpy._core.multiarray")  # of numpy 1 and 2


def takes_names() -> bool:
    """Whether torch can allow an object under another name than its own, as it can since version 2.6."""
    return hasattr(torch.serialization, "get_unsafe_globals_in_checkpoint")


class PlainDtype:
    """Takes the place of numpy.dtype."""

    def __init__(self, code: str, *unused: Any):
        if code not in DTYPES:
            raise UnpicklingError(f"contains an array of numpy's type {code}, which is not one of {', '.join(DTYPES)}")
        self.dtype = np.dtype(DTYPES[code])

    def __setstate__(self, state: Any) -> None:
        if state[1] != "<":
            raise UnpicklingError(f"contains numbers with the byte order {state[1]}, which is not that of this machine")


def numbers(content: bytes, kind: PlainDtype) -> np.ndarray:
    if not isinstance(kind, PlainDtype):
        raise UnpicklingError(f"contains numbers of the type {kind}, which is not one of numpy")
    return np.frombuffer(content, kind.dtype)


class PlainArray(np.ndarray):
    """Takes the place of numpy.ndarray and of the function that makes an empty one, which `__setstate__` then fills."""

    def __new__(cls, *unused: Any) -> "PlainArray":
        return super().__new__(cls, 0)

    def __setstate__(self, state: Any) -> None:
        if self.size:  # a tensor may share its memory
            raise UnpicklingError("contains an array that is filled twice")
        _, shape, kind, by_columns, content = state
        super().__setstate__(numbers(content, kind).reshape(shape, order="F" if by_columns else "C").__reduce__()[2])

    def __reduce__(self) -> Any:
        """That of numpy: the next checkpoint contains the array under its usual name."""
        return np.array(self).__reduce__()


class PlainNumber:
    """Takes the place of the function that makes numbers."""

    def __new__(cls, kind: PlainDtype, content: bytes) -> Any:
        return numbers(content, kind)[0]


def called(kind: type, *names: str) -> List[type]:
    """Subclasses with other names: torch finds what it may create by module and name."""
    parts = (name.rpartition(".") for name in names)
    return [type(name, (kind,), {"__module__": module}) for module, _, name in parts]


def of_numpy(dtype: type, array: type, number: type) -> List[Any]:
    """Classes for dtypes, arrays and numbers under the names that pickles of numpy contain, and what makes bytes."""
    arrays = called(array, "numpy.ndarray", *(f"{core}._reconstruct" for core in CORES))
    numbers = called(number, *(f"{core}.scalar" for core in CORES))
    return [*called(dtype, "numpy.dtype"), *arrays, *numbers, codecs.encode]


def allow_plain_containers() -> None:
    """Lets torch.load read them in this process; importing `mega_fairseq.models` calls this."""
    # torch needs the name, which Python < 3.10 lacks.
    anything = [typing.Any] if hasattr(typing.Any, "__name__") else []
    broadcast = [  # in a config that fairseq sends from the first process to the others
        omegaconf.DictConfig,
        omegaconf.ListConfig,
        omegaconf.nodes.AnyNode,
        omegaconf.base.ContainerMetadata,
        omegaconf.base.Metadata,
        collections.defaultdict,
        *anything,
        dict,
        list,
        int,
        _TensorPlaceholder,
    ]
    counts = of_numpy(PlainDtype, PlainArray, PlainNumber)  # of --eval-bleu
    torch.serialization.add_safe_globals([argparse.Namespace, *counts, *broadcast])
