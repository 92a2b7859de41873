"""Globals that a checkpoint may contain when torch reads weights only, which is its default since version 2.6.

Checkpoints of this package contain tensors and plain containers. Those of stock models (a Transformer to compare with
or a teacher), runs with --eval-bleu and the data that fairseq broadcasts to other processes when it resumes also
contain the classes below, which are plain data. They are added to torch's allow-list; fairseq is not changed.
"""

import argparse
import collections
import typing
from typing import Any, List, Tuple

import numpy as np
import omegaconf
import torch
from fairseq.distributed.utils import _TensorPlaceholder

DTYPES = ("float64", "float32", "int64")


def takes_names() -> bool:
    """Whether torch can allow an object under another name than its own, as it can since version 2.6."""
    return hasattr(torch.serialization, "get_unsafe_globals_in_checkpoint")


def numpy_functions() -> List[Tuple[Any, str]]:
    """Functions that pickled arrays and numbers call, with their names in numpy 1 and in numpy 2."""
    functions = {"_reconstruct": np.zeros(1).__reduce__()[0], "scalar": np.float64().__reduce__()[0]}
    return [(f, f"numpy.{core}.multiarray.{name}") for core in ("core", "_core") for name, f in functions.items()]


def allow_plain_containers() -> None:
    """Lets torch.load read them in this process; importing `mega_fairseq.models` calls this."""
    functions = numpy_functions() if takes_names() else [function for function, _ in numpy_functions()]
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
    counts = [np.ndarray, np.dtype, *functions, *(type(np.dtype(name)) for name in DTYPES)]  # of --eval-bleu
    torch.serialization.add_safe_globals([argparse.Namespace, *counts, *broadcast])
