"""What a checkpoint may hold when torch reads weights only, as it does since version 2.6.

Runs of ours hold tensors and plain containers. Those of stock models (a Transformer to compare with, a teacher) also
hold the containers below, which are data. This is torch's own allow-list; it changes nothing in fairseq.
"""

import argparse
import collections
import typing
from typing import Any, List, Tuple

import numpy as np
import omegaconf
import torch
from fairseq.distributed.utils import _TensorPlaceholder

DTYPES = ("float64", "float32", "int64", "int32", "bool")


def takes_names() -> bool:
    """Whether torch can be told to trust an object under another name than its own, as since 2.6."""
    return hasattr(torch.serialization, "get_unsafe_globals_in_checkpoint")


def numpy_functions() -> List[Tuple[Any, str]]:
    """Those that pickled arrays and numbers call, by their names in numpy 1 and in numpy 2, which has moved them."""
    functions = {"_reconstruct": np.zeros(1).__reduce__()[0], "scalar": np.float64().__reduce__()[0]}
    return [(f, f"numpy.{core}.multiarray.{name}") for core in ("core", "_core") for name, f in functions.items()]


def allow_plain_containers() -> None:
    """Tells torch.load that fairseq's configs, numpy numbers and argparse's namespaces are data."""
    functions = numpy_functions() if takes_names() else [function for function, _ in numpy_functions()]
    metadata = omegaconf.base
    anything = [typing.Any] if hasattr(typing.Any, "__name__") else []  # which torch asks for, and old Pythons lack
    torch.serialization.add_safe_globals(
        [
            argparse.Namespace,
            np.ndarray,
            np.dtype,
            *functions,
            *(type(np.dtype(name)) for name in DTYPES),
            omegaconf.DictConfig,
            omegaconf.ListConfig,
            omegaconf.nodes.AnyNode,
            metadata.ContainerMetadata,
            metadata.Metadata,
            collections.defaultdict,
            *anything,
            dict,
            list,
            int,
            float,
            str,
            bool,
            _TensorPlaceholder,
        ]
    )
