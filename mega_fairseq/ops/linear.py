"""Projections that are prepared once and used many times on a few rows each, as in decoding.

A step of beam search multiplies every weight of the model by a few rows. On the CPU the usual product then takes two to
four times as long as reading the weights; oneDNN's takes as long as reading weights that are packed for it. Packing
costs a copy and about as much time as ten such products, so it is not done for each step.
"""

from typing import Callable, Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from mega_fairseq.ops.backend import on_cpu
from mega_fairseq.ops.operators import is_plain

Projection = Callable[[Tensor], Tensor]  # (R, in) -> (R, out)


def ready_linear(weight: Tensor, bias: Optional[Tensor] = None) -> Projection:
    """Returns the fastest function x -> x W^T + b for a few rows x, without gradients."""
    if is_plain(weight) and packing_runs(weight):
        return _packed_linear(weight, bias)
    return lambda x: F.linear(x, weight, bias)


def packing_runs(weight: Tensor) -> bool:
    """Whether oneDNN's packed products can be used for this weight."""
    return on_cpu(weight) and weight.dtype == torch.float32 and PACKING_WORKS


def _packed_linear(weight: Tensor, bias: Optional[Tensor]) -> Projection:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous())
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


def _packing_works() -> bool:
    """Whether this torch has the private operators that `_packed_linear` calls."""
    weight = torch.ones(2, 2, device="cpu", dtype=torch.float32)
    try:
        outputs = [_packed_linear(weight, bias)(weight) for bias in (None, weight[0])]
    except (AttributeError, RuntimeError, TypeError):  # missing, not built in, or changed
        return False
    return all(bool(y.eq(2.0 + bias).all()) for bias, y in enumerate(outputs))


PACKING_WORKS = _packing_works()  # tested on import, when no torch mode that traces tensors is active
