"""Projections that are prepared once and used many times on a few rows each, as in decoding.

A step of beam search multiplies every weight of the model by a few rows. On the CPU the usual product then takes two to
four times as long as reading the weights; oneDNN's takes as long as reading weights that are packed for it. Packing
costs a copy and about as much time as ten such products, so it is not done for each step.

Weights can also be packed in int8, with one scale per output. Then each row of the input is rounded to int8 with a
scale of its own, so that no row depends on others, and the sums of products are exact.
"""

from contextlib import contextmanager
from contextvars import ContextVar
from typing import Callable, Iterator, Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from mega_fairseq.ops.operators import is_plain

Projection = Callable[[Tensor], Tensor]  # (R, in) -> (R, out)
FORMATS = ("float32", "int8")
_format = ContextVar("format", default="float32")


@contextmanager
def weights_in(number_format: str) -> Iterator[None]:
    """Projections that are made ready in this context have weights in this format."""
    token = _format.set(number_format)
    try:
        yield
    finally:
        _format.reset(token)


def ready_linear(weight: Tensor, bias: Optional[Tensor] = None) -> Projection:
    """Returns the fastest function x -> x W^T + b for a few rows x, without gradients."""
    if not is_plain(weight):
        return lambda x: F.linear(x, weight, bias)
    if _format.get() == "int8":
        _check_int8(weight)
        return _int8_linear(weight, bias)
    return _packed_linear(weight, bias) if packing_runs(weight) else lambda x: F.linear(x, weight, bias)


def _check_int8(weight: Tensor) -> None:
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        actual = f"{weight.dtype} on {weight.device.type}"
        raise ValueError(f"weights in int8 are made from float32 on the CPU, and these are {actual}; leave out int8")
    if not INT8_WORKS:
        raise ValueError("this torch has no exact products in int8 on this CPU; leave out int8")


def packing_runs(weight: Tensor) -> bool:
    """Whether oneDNN's packed products can be used for this weight."""
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and PACKING_WORKS


def _packed_linear(weight: Tensor, bias: Optional[Tensor]) -> Projection:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous())
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


LARGEST = 127  # of int8
ZERO = 128  # oneDNN takes inputs in uint8, which represent -128 to 127
SMALLEST = torch.finfo(torch.float32).tiny  # scale of a row of zeros


def _int8_linear(weight: Tensor, bias: Optional[Tensor]) -> Projection:
    weight = weight.detach()
    scale = weight.abs().amax(1).div(LARGEST).clamp_min(SMALLEST)  # (out,)
    packed = torch.ops.onednn.qlinear_prepack(weight.div(scale.unsqueeze(1)).round().to(torch.int8), None)
    no_shift = torch.zeros_like(scale, dtype=torch.long)
    bias = scale.new_zeros(()) if bias is None else bias.detach()

    def product(x: Tensor) -> Tensor:
        of_row = x.abs().amax(1, keepdim=True).div(LARGEST).clamp_min(SMALLEST)  # (R, 1)
        rounded = x.div(of_row).add_(ZERO + 0.5).to(torch.uint8)
        out = (None, 1.0, 0, torch.float32, "none", [], "")  # neither bias nor function; in float32
        y = torch.ops.onednn.qlinear_pointwise(rounded, 1.0, ZERO, packed, scale, no_shift, *out)
        return torch.addcmul(bias, y, of_row)

    return product


def _works(make: Callable[[Tensor, Optional[Tensor]], Projection], width: int) -> bool:
    """Whether this torch has the private operators that `make` calls, and the CPU adds up the largest products."""
    options = {"device": "cpu", "dtype": torch.float32}
    signs, x = torch.tensor([[1.0], [-1.0]], **options), torch.ones(1, width, **options)
    try:
        outputs = [make(signs.expand(-1, width).contiguous(), bias)(x) for bias in (None, torch.ones(2, **options))]
    except (AttributeError, RuntimeError, TypeError):  # missing, not built in, or changed
        return False
    return all(torch.allclose(y, width * signs.t() + bias) for bias, y in enumerate(outputs))


# Tested on import, when no torch mode that traces tensors is active.
PACKING_WORKS = _works(_packed_linear, 2)
INT8_WORKS = _works(_int8_linear, 64)
