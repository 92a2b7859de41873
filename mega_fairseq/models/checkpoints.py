"""What a checkpoint may hold when torch reads weights only, as it does since version 2.6.

Runs of ours hold tensors and plain containers. Those of stock models (a Transformer to compare with, a teacher) also
hold the containers below: all are plain data, none runs code when it is read. This is torch's own allow-list; it
changes nothing in fairseq.
"""

import argparse
import collections
import typing

import numpy as np
import omegaconf
import torch
from fairseq.distributed.utils import _TensorPlaceholder


def allow_plain_containers() -> None:
    """Tells torch.load that fairseq's configs, numpy numbers and argparse's namespaces are data."""
    reconstruct, scalar = np.zeros(1).__reduce__()[0], np.float64().__reduce__()[0]  # numpy 2 has moved both
    metadata = omegaconf.base
    anything = [typing.Any] if hasattr(typing.Any, "__name__") else []  # which torch asks for, and old Pythons lack
    torch.serialization.add_safe_globals(
        [
            argparse.Namespace,
            np.ndarray,
            np.dtype,
            reconstruct,
            scalar,
            *(type(np.dtype(kind)) for kind in ("float64", "float32", "int64", "int32", "bool")),
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
