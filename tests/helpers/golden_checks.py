"""Helpers of the golden tests: running modules in pieces, deciding which released outputs are right, comparisons."""

from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers.golden_cases import Case, build, cases, released_gradients

OUTPUT_TOLERANCE, GRADIENT_TOLERANCE = 1e-5, 1e-4  # absolute, specified with the cases
INPUTS = ("x", "query", "key")

Loss = Callable[..., Tensor]  # (module, inputs by name) -> scalar
Check = Callable[[Tensor, Tensor, str, float], None]  # of ours and the released ones, with a name and a tolerance


def each(*kinds: str, where: Callable[[Case], object] = lambda case: True):
    """Parametrizes a test over the cases of these kinds that satisfy `where`."""
    fitting = [case for case in cases(*kinds) if where(case)]
    return pytest.mark.parametrize("case", fitting, ids=[case.name for case in fitting])


# -------------------------------------------------------------------------------------- running


def run(module: nn.Module, x: Tensor, padding: Optional[Tensor] = None) -> Tensor:
    """The output of a causal or bidirectional module, without its state."""
    y = module(x, padding_mask=padding)
    return y[0] if isinstance(y, tuple) else y


def pieces(length: int, sizes: Sequence[int]) -> List[Tuple[int, int]]:
    """(start, stop) of pieces of these sizes, repeated until `length` is covered."""
    bounds: List[Tuple[int, int]] = []
    while not bounds or bounds[-1][1] < length:
        start = bounds[-1][1] if bounds else 0
        bounds.append((start, min(length, start + sizes[len(bounds) % len(sizes)])))
    return bounds


def in_pieces(
    module: Callable[..., Any], x: Tensor, padding: Optional[Tensor], sizes: Sequence[int], state: Any = None
) -> Tuple[Tensor, List[Any]]:
    """Runs a causal module over x in pieces: outputs (B, L, D) and the state after each piece."""
    ys, states = [], []
    for start, stop in pieces(x.size(1), sizes):
        y, state = module(x[:, start:stop], state, None if padding is None else padding[:, start:stop])
        ys.append(y)
        states.append(state)
    return torch.cat(ys, 1), states


# -------------------------------------------------------------------------------------- right and wrong


def leading_pads(padding: Tensor) -> Tensor:
    """(B,) number of pads before the first real token; 0 for a row without real tokens."""
    return padding.int().cumprod(1).sum(1) % padding.size(1)


def trailing_pads(padding: Optional[Tensor], x: Tensor) -> Tensor:
    """(B, 1, 1) number of pads after the last real token."""
    if padding is None:
        return torch.zeros(x.size(0), 1, 1)
    return padding.int().flip(1).cumprod(1).sum(1).view(-1, 1, 1)


def wrong_rows(case: Case) -> Tensor:
    """(B,) bool: sentences whose released outputs at real tokens are wrong (docs/paper-deviations.md)."""
    if case.padding is None:
        return torch.zeros(case.real.size(0), dtype=torch.bool)
    length, leading = case.real.size(1), leading_pads(case.padding)
    first, last = leading, length - trailing_pads(case.padding, case.padding).flatten()
    scattered = case.real.sum(1) != (last - first).clamp_min(0)
    if case.kind == "ema":
        return scattered
    if case.kind == "cross":  # its position bias counts pads; a source of pads only gives NaN
        return scattered | (leading > 0) | case.padding.all(1)
    if "y_incremental" in case.outputs:  # it forgets which of the past keys were pads
        return scattered | (leading > 0)
    chunk = min(case.chunk_size or length, length)
    shifted = leading % chunk > 0
    if case.causal and case.config.get("attention_activation", "softmax") != "softmax":  # tau counts pads
        return scattered | shifted
    return scattered | (shifted & (chunk < length))  # chunk borders count pads


def right(case: Case) -> Tensor:
    """(B, L) bool: real tokens whose released outputs are right."""
    return case.real & ~wrong_rows(case).unsqueeze(1)


def pads_in_batch_statistics(case: Case) -> bool:
    """Whether the release would take a batch norm's training statistics over pads."""
    return "batchnorm" in case.config.get("norm_type", "") and not bool(case.real.all())


def released_gradients_are_right(case: Case) -> bool:
    """Whether all gradients are right: one wrong sentence or a NaN at a pad makes these sums over the batch wrong."""
    recorded = [*case.gradients.values(), *case.input_gradients.values()]
    if not recorded or wrong_rows(case).any() or not all(g.isfinite().all() for g in recorded):
        return False
    return not (case.gradients_of_training and pads_in_batch_statistics(case))


# -------------------------------------------------------------------------------------- comparing


def released_outputs(case: Case, module: nn.Module) -> Tensor:
    """Released outputs and, where those of an EMA are not finite, those of its released one-step recurrence."""
    y = case.outputs["y"]
    if "onestep_ema" not in case.outputs:
        return y
    recurrence = F.silu(case.outputs["onestep_ema"] + module.omega.detach() * case.inputs["x"])
    return torch.where(y.isfinite(), y, recurrence)


def assert_outputs(ours: Tensor, released: Tensor, what: str, tolerance: float = OUTPUT_TOLERANCE) -> None:
    assert released.isfinite().all(), f"the released {what} is not finite"
    torch.testing.assert_close(ours, released, rtol=0.0, atol=tolerance, msg=lambda text: f"{what}: {text}")


def assert_released_gradients(case: Case, loss: Loss) -> None:
    """Compares every recorded gradient of parameters and inputs.

    The comparison is in double precision, where results do not depend on the order of additions, and so not on the
    processor. Models compare those in single precision (`assert_all_gradients`).
    """
    module = build(case).double()
    inputs = {
        name: case.inputs[name].to(torch.float64, copy=True).requires_grad_() for name in INPUTS if name in case.inputs
    }
    loss(module, **inputs).backward()
    leaves = {**dict(module.named_parameters()), **inputs}
    for name, released in {**released_gradients(case), **case.input_gradients}.items():
        assert_outputs(leaves[name].grad, released.double(), f"gradient of {name}", GRADIENT_TOLERANCE)


def assert_all_gradients(case: Case, model: nn.Module, check: Check = assert_outputs, **inputs: Tensor) -> None:
    """Compares the gradients of all parameters of a model and of its inputs with the recorded ones."""
    leaves = {**dict(model.named_parameters()), **inputs}
    expected = {**released_gradients(case), **case.input_gradients}
    assert leaves.keys() == expected.keys()
    for name, leaf in leaves.items():
        check(leaf.grad, expected[name].to(leaf.dtype), f"gradient of {name}", GRADIENT_TOLERANCE)


def assert_batch_statistics(case: Case, module: nn.Module) -> None:
    """Compares every running mean and variance recorded after the training pass."""
    buffers: Dict[str, Tensor] = {name.rpartition(".")[2]: b for name, b in module.named_buffers()}
    for name, released in case.outputs.items():
        if name.startswith("running_"):
            assert_outputs(buffers[name.partition("_after")[0]], released, name)
