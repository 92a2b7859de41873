"""The contracts of causal and padded layers, as checks that raise AssertionError, for any mixer, block or model.

A model under test is a `Layer`: a callable `y, state = step(x, state, padding_mask)` with x (B, L, ...) batch-first,
padding_mask bool (B, L) with True = pad, and state any nested tuple of batch-first tensors (None at the start).
A layer without memory returns None as state. `parameters` are the tensors whose gradients are compared.

Sequences of different lengths are given as `rows`, one tensor (n_i, ...) each, possibly empty; `masks` define the
positions of their tokens in a padded batch. test_controls.py also runs every check on broken layers, which it must
reject.
"""

import math
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Callable, List, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn

State = Any
Step = Callable[[Tensor, State, Optional[Tensor]], Tuple[Tensor, State]]

TOLERANCE = 1e-9  # for float64 results that differ in the order of summation
EXACT = 1e-12  # for float64 results of the same computation


def _nothing() -> None:
    return None


@dataclass(frozen=True)
class Layer:
    """The subject of a check; `start` returns the state before the first token, for all rows of the batch."""

    step: Step
    parameters: Sequence[Tensor] = ()
    start: Callable[[], State] = _nothing


# ------------------------------------------------------------------------------------------- states and tensors


def map_state(function: Callable[[Tensor], Tensor], state: State) -> State:
    """The state with `function` applied to each of its tensors."""
    if isinstance(state, Tensor):
        return function(state)
    if isinstance(state, tuple):
        parts = [map_state(function, part) for part in state]
        return type(state)(*parts) if hasattr(state, "_fields") else tuple(parts)
    return state


def select_rows(state: State, order: Sequence[int]) -> State:
    """Reorders, repeats and drops rows of a state, like beam search."""
    return map_state(lambda t: t.index_select(0, torch.tensor(list(order), device=t.device)), state)


def leaves(state: State) -> List[Any]:
    """Everything in the state that is not a tuple, in order."""
    return [leaf for part in state for leaf in leaves(part)] if isinstance(state, tuple) else [state]


def assert_close(actual: Tensor, expected: Tensor, what: str, tolerance: float = TOLERANCE) -> None:
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)}, not {tuple(expected.shape)}"
    if actual.numel() == 0:
        return
    assert bool(torch.isfinite(actual).all()), f"{what}: not finite"
    scale = 1.0 + float(expected.detach().abs().max())
    gap = float((actual.detach() - expected.detach()).abs().max())
    assert gap <= tolerance * scale, f"{what}: off by {gap:.3g} at a scale of {scale:.3g}"


def assert_same_state(actual: State, expected: State, what: str, tolerance: float = TOLERANCE) -> None:
    ours, theirs = leaves(actual), leaves(expected)
    assert len(ours) == len(theirs), f"{what}: {len(ours)} parts, not {len(theirs)}"
    for i, (a, b) in enumerate(zip(ours, theirs)):
        if isinstance(a, Tensor) and isinstance(b, Tensor) and a.is_floating_point():
            assert_close(a, b, f"{what}, part {i}", tolerance)
        elif isinstance(a, Tensor) and isinstance(b, Tensor):
            assert torch.equal(a, b), f"{what}, part {i}: {a} is not {b}"
        else:
            assert type(a) is type(b), f"{what}, part {i}: {type(a).__name__}, not {type(b).__name__}"
            assert a == b, f"{what}, part {i}: {a!r} is not {b!r}"


def _leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_()


def _probe(y: Tensor) -> Tensor:
    """A scalar that depends on every entry of y (n, ...), with weights by position."""
    weights = torch.cos(1.0 + 1.7 * torch.arange(y.numel(), dtype=torch.float64))
    return (y * weights.view(y.shape).to(y.dtype)).sum()


def gradients(loss: Tensor, of: Sequence[Tensor]) -> List[Tensor]:
    """d loss / d t for each tensor, with zeros for tensors without a gradient."""
    asked = [t for t in of if t.requires_grad]
    if not asked or not loss.requires_grad:
        return [torch.zeros_like(t) for t in asked]
    grads = torch.autograd.grad(loss, asked, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for t, g in zip(asked, grads)]


def _assert_same_gradients(layer: Layer, actual: Tuple[Tensor, Sequence[Tensor]], expected, what: str) -> None:
    (loss, inputs), (expected_loss, expected_inputs) = actual, expected
    ours = gradients(loss, [*inputs, *layer.parameters])
    theirs = gradients(expected_loss, [*expected_inputs, *layer.parameters])
    for i, (a, b) in enumerate(zip(ours, theirs)):
        assert_close(a, b, f"{what}: gradient {i}, inputs first and parameters after them")


# ------------------------------------------------------------------------------------------- padding


def place(rows: Sequence[Tensor], mask: Tensor, filler: Tensor) -> Tensor:
    """(B, L, ...) with the rows' tokens in order where `mask` (B, L) is False, and `filler` elsewhere."""
    out = filler.clone()
    out[~mask] = torch.cat(list(rows))
    return out


def take(y: Tensor, mask: Tensor) -> List[Tensor]:
    """The inverse of `place`: each row's real outputs."""
    return [row[~pads] for row, pads in zip(y, mask)]


def _garbage(rows: Sequence[Tensor], mask: Tensor) -> Tensor:
    """(B, L, ...) of numbers much larger than any real input."""
    shape = (*mask.shape, *rows[0].shape[1:])
    return (1e4 * torch.sin(37.0 * torch.arange(1, 1 + math.prod(shape)))).view(shape).to(rows[0].dtype)


def _alone(layer: Layer, rows: Sequence[Tensor]) -> Tuple[List[Tensor], List[State]]:
    """Each row's outputs and state when it is processed alone."""
    outputs, states, start = [], [], layer.start()
    for i, row in enumerate(rows):
        state = select_rows(start, [i])
        y = None
        if len(row):
            y, state = layer.step(row.unsqueeze(0), state, None)
            y = y.squeeze(0)
        outputs.append(y)
        states.append(state)
    return outputs, states


def _assert_rows(actual: Sequence[Tensor], expected: Sequence[Optional[Tensor]], what: str) -> None:
    for i, (a, b) in enumerate(zip(actual, expected)):
        assert (b is None) == (len(a) == 0)
        if b is not None:
            assert_close(a, b, f"{what}, row {i}")


def _assert_continues(layer: Layer, state: State, alone: Sequence[State], tails: Tensor, what: str) -> None:
    """Checks that a state of several rows gives the same outputs for `tails` as the states of the rows alone."""
    together, _ = layer.step(tails, state, None)
    for i, own in enumerate(alone):
        assert_close(together[i], layer.step(tails[i : i + 1], own, None)[0][0], f"{what}, row {i}")


def _loss(outputs: Sequence[Optional[Tensor]]) -> Tensor:
    return sum((_probe(y) for y in outputs if y is not None and len(y)), torch.zeros(()))


# ------------------------------------------------------------------------------------------- any split


def check_split_anywhere(layer: Layer, x: Tensor, pieces: Sequence[int]) -> None:
    """Outputs, final state and all gradients over pieces with carried state equal those of the whole x (B, L, ...)."""
    assert sum(pieces) == x.size(1)
    whole, split = _leaf(x), _leaf(x)
    expected, expected_state = layer.step(whole, layer.start(), None)
    state, outputs = layer.start(), []
    for piece in split.split(list(pieces), 1):
        y, state = layer.step(piece, state, None)
        outputs.append(y)
    actual = torch.cat(outputs, 1)
    assert_close(actual, expected, f"outputs over pieces of {list(pieces)}")
    assert_same_state(state, expected_state, f"state after pieces of {list(pieces)}")
    ends = [
        sum(_probe(t) for t in leaves(s) if isinstance(t, Tensor) and t.requires_grad) for s in (state, expected_state)
    ]
    _assert_same_gradients(
        layer, (_probe(actual) + ends[0], [split]), (_probe(expected) + ends[1], [whole]), f"pieces of {list(pieces)}"
    )


def check_ragged_pieces(layer: Layer, rows: Sequence[Tensor], masks: Sequence[Tensor], tails: Tensor) -> None:
    """The same if rows of a batch have different numbers of tokens in each piece.

    masks[p] (B, L_p) is the mask of piece p; a row's unpadded positions over all pieces add up to its length.
    `tails` (B, n, ...) are the tokens that follow, to compare final states.
    """
    whole, split = [_leaf(row) for row in rows], [_leaf(row) for row in rows]
    expected, expected_states = _alone(layer, whole)
    state, outputs = layer.start(), [[] for _ in rows]
    rest = list(split)
    for mask in masks:
        counts = (~mask).sum(1).tolist()
        now, rest = [r[:n] for r, n in zip(rest, counts)], [r[n:] for r, n in zip(rest, counts)]
        y, state = layer.step(place(now, mask, _garbage(rows, mask)), state, mask if mask.any() else None)
        assert not y[mask].any(), "padded outputs are not zero"
        for kept, new in zip(outputs, take(y, mask)):
            kept.append(new)
    assert not any(len(r) for r in rest)
    actual = [torch.cat(parts) for parts in outputs]
    _assert_rows(actual, expected, "outputs over ragged pieces")
    _assert_same_gradients(layer, (_loss(actual), split), (_loss(expected), whole), "ragged pieces")
    _assert_continues(layer, state, expected_states, tails, "after ragged pieces")


def check_state_is_a_value(layer: Layer, x: Tensor, other: Tensor, cut: int) -> None:
    """A state can be used again after it was passed on, for any branch, and later calls do not change it."""
    first, state = layer.step(x[:, :cut], layer.start(), None)
    _, state = layer.step(other[:, :1], state, None)  # the next token: now a cache may be longer than what it holds
    kept = map_state(lambda t: t.detach().clone(), state)
    expected, _ = layer.step(x[:, cut:], state, None)
    expected = expected.clone()
    branch = state
    for t in range(cut, other.size(1)):
        _, branch = layer.step(other[:, t : t + 1], branch, None)
    assert_same_state(map_state(torch.detach, state), kept, "a state that was passed on", 0.0)
    again, _ = layer.step(x[:, cut:], state, None)
    assert_close(again, expected, "outputs from a state used before", EXACT)
    repeated, _ = layer.step(x[:, :cut], layer.start(), None)
    assert_close(repeated, first, "outputs of a layer used before", EXACT)


def check_reordering(
    layer: Layer,
    rows: Sequence[Tensor],
    mask: Tensor,
    tails: Tensor,
    order: Sequence[int],
    select: Callable[[Any, Sequence[int]], Any] = select_rows,
) -> None:
    """After `select`, by default index_select of all tensors, row i continues sequence order[i], with tails[i]."""
    padded = place(rows, mask, _garbage(rows, mask))
    _, state = layer.step(padded, layer.start(), mask if mask.any() else None)
    actual, _ = layer.step(tails, select(state, order), None)
    start = layer.start()
    for i, origin in enumerate(order):
        history = torch.cat([rows[origin], tails[i]]).unsqueeze(0)
        y, _ = layer.step(history, select_rows(start, [origin]), None)
        assert_close(actual[i], y[0, len(rows[origin]) :], f"row {i} continues sequence {origin}")


# ------------------------------------------------------------------------------------------- batch independence


def check_batch_independence(
    layer: Layer, rows: Sequence[Tensor], mask: Tensor, tails: Optional[Tensor] = None, filler: Optional[Tensor] = None
) -> None:
    """Outputs, gradients and states of each row are the same alone and in the batch that mask (B, L) defines.

    Padded outputs are zero; padded inputs (`filler`, by default large numbers) get no gradient. `tails` (B, n, ...)
    are the tokens that follow in a layer with memory, to compare states.
    """
    own, shared = [_leaf(row) for row in rows], [_leaf(row) for row in rows]
    filler = _leaf(_garbage(rows, mask) if filler is None else filler)
    expected, expected_states = _alone(layer, own)
    y, state = layer.step(place(shared, mask, filler), layer.start(), mask)
    assert not y[mask].any(), "padded outputs are not zero"
    actual = take(y, mask)
    _assert_rows(actual, expected, "outputs in a batch")
    for grad in gradients(_loss(actual) + _probe(y), [filler]):
        assert not grad[mask].any(), "a padded input has a gradient"
    y, _ = layer.step(place(shared, mask, filler), layer.start(), mask)
    _assert_same_gradients(layer, (_loss(take(y, mask)), shared), (_loss(expected), own), "in a batch")
    if tails is not None:
        _assert_continues(layer, state, expected_states, tails, "after a batch")


# ------------------------------------------------------------------------------------------- causality


def check_nothing_from_the_future(
    layer: Layer, x: Tensor, other: Tensor, cut: int, mask: Optional[Tensor] = None
) -> None:
    """Outputs before `cut` depend on no input from `cut` on, nor on their number.

    By value (the rest changed to `other`, and left out) and by gradient.
    """
    x = _leaf(x)
    y, _ = layer.step(x, layer.start(), mask)
    changed, _ = layer.step(torch.cat([x[:, :cut], other[:, cut:]], 1), layer.start(), mask)
    assert_close(changed[:, :cut], y[:, :cut], f"outputs before {cut} when the rest changes", EXACT)
    if cut:
        alone, _ = layer.step(x[:, :cut], layer.start(), None if mask is None else mask[:, :cut])
        assert_close(alone, y[:, :cut], f"outputs before {cut} without the rest")
    for grad in gradients(_probe(y[:, :cut]), [x]):
        assert_close(
            grad[:, cut:], torch.zeros_like(grad[:, cut:]), f"gradient of outputs before {cut} after it", EXACT
        )


# ------------------------------------------------------------------------------------------- any length


def check_equals_reference(
    layer: Layer, reference: Callable[[Tensor, Optional[Tensor]], Tensor], x: Tensor, mask: Optional[Tensor] = None
) -> None:
    """Values and gradients equal those of `reference(x, mask)`, a readable form with the same parameters."""
    ours, theirs = _leaf(x), _leaf(x)
    actual, _ = layer.step(ours, layer.start(), mask)
    expected = reference(theirs, mask)
    assert_close(actual, expected, f"outputs at length {x.size(1)}")
    _assert_same_gradients(
        layer, (_probe(actual), [ours]), (_probe(expected), [theirs]), f"reference at length {x.size(1)}"
    )


# ------------------------------------------------------------------------------------------- numerical stability


def check_finite(layer: Layer, x: Tensor, mask: Optional[Tensor] = None) -> None:
    """Outputs, state and gradients contain no NaN and no infinity."""
    x = _leaf(x)
    y, state = layer.step(x, layer.start(), mask)
    tensors = [("output", y), *(("state", t) for t in leaves(state) if isinstance(t, Tensor))]
    tensors += [("gradient", g) for g in gradients(_probe(y[0]), [x, *layer.parameters])]
    for name, tensor in tensors:
        assert bool(torch.isfinite(tensor).all()), f"{name} of shape {tuple(tensor.shape)} is not finite"


def check_near(layer: Layer, exact: Layer, x: Tensor, tolerance: float, mask: Optional[Tensor] = None) -> None:
    """Outputs have at most this relative RMS error, compared with the layer `exact` in float64."""
    y, _ = layer.step(x, layer.start(), mask)
    truth, _ = exact.step(x.double(), exact.start(), mask)
    assert y.dtype == x.dtype, f"output has dtype {y.dtype}, not {x.dtype}"
    y, truth = y.detach().double(), truth.detach()
    error = float((y - truth).pow(2).mean().sqrt() / truth.pow(2).mean().sqrt())
    assert error <= tolerance, f"relative RMS error {error:.3g}, more than {tolerance:.3g}"


# ------------------------------------------------------------------------------------------- no stale caches


def check_nothing_is_stale(make: Callable[[], nn.Module], layer_of: Callable[[nn.Module], Layer], x: Tensor) -> None:
    """After any change, a module that has been used equals a fresh one with the same parameters.

    `make` builds a module with new random parameters at each call; `layer_of` converts it to a Layer.
    """
    module = make()
    for name, change in _changes(make):
        for mode in (False, True):  # used in both modes before the change, and compared in both after it
            with torch.no_grad():
                layer = layer_of(module.train(mode))
                layer.step(x.to(next(module.parameters()).dtype), layer.start(), None)
        module = change(module)
        fresh = make().to(next(module.parameters()).dtype)
        fresh.load_state_dict(module.state_dict())
        for mode in (False, True):
            _assert_same_module(layer_of(module.train(mode)), layer_of(fresh.train(mode)), x, name)


def _changes(make: Callable[[], nn.Module]) -> List[Tuple[str, Callable[[nn.Module], nn.Module]]]:
    def in_place(change: Callable[[nn.Parameter], Any]) -> Callable[[nn.Module], nn.Module]:
        def changed(module: nn.Module) -> nn.Module:
            with torch.no_grad():
                for parameter in module.parameters():
                    change(parameter)
            return module

        return changed

    def load(module: nn.Module) -> nn.Module:
        module.load_state_dict(make().state_dict())
        return module

    def optimise(module: nn.Module) -> nn.Module:
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
        torch.optim.SGD(module.parameters(), lr=0.1).step()
        module.zero_grad()
        return module

    def replace(parameter: nn.Parameter) -> None:
        parameter.data = parameter.data * 1.3

    return [
        ("no change", lambda module: module),
        ("load_state_dict", load),
        ("an update in place", in_place(lambda p: p.mul_(0.8))),
        ("an optimiser's step", optimise),
        ("new .data", in_place(replace)),
        ("deepcopy and an update", lambda module: in_place(lambda p: p.mul_(1.1))(deepcopy(module))),
        ("float()", lambda module: module.float()),
        ("double()", lambda module: module.double()),
    ]


def _assert_same_module(ours: Layer, theirs: Layer, x: Tensor, name: str) -> None:
    dtype = ours.parameters[0].dtype
    results = []
    for layer in (ours, theirs):
        inputs = _leaf(x.to(dtype))
        y, _ = layer.step(inputs, layer.start(), None)
        loss, asked = _probe(y), [inputs, *layer.parameters]
        once = torch.autograd.grad(loss, asked, retain_graph=True, allow_unused=True)
        twice = torch.autograd.grad(loss, asked, allow_unused=True)
        results.append([y, *once])
        for a, b in zip(once, twice):
            assert (a is None) == (b is None)
            if a is not None:
                assert_close(b, a, f"second backward pass after {name}", EXACT)
    for a, b in zip(*results):
        assert (a is None) == (b is None), f"after {name} a gradient came or went"
        if a is not None:
            assert_close(a, b, f"output or gradient after {name}", EXACT)
