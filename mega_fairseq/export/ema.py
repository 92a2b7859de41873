"""The damped EMA in a graph (ops/ema has its definition).

States are multiplied by eta, so that a kernel is K_t = sum_n c_n phi_n^t with c = alpha beta eta, and an output is the
plain sum of a channel's states. The poles phi of a kernel lie close together, so fewer of them give the same kernel
(`reduced`).

Whole sequences are cut into blocks of C tokens. A product with a constant gives what the tokens of a block add to each
other's outputs and to the state at its end; a scan over blocks gives the state at the beginning of each; and a product
with another constant what that adds to the outputs.
"""

from typing import List, NamedTuple, Optional, Tuple

import numpy as np
import onnx
from onnx import TensorProto, helper
from torch import Tensor

from mega_fairseq.export.graph import Graph, Value
from mega_fairseq.export.layers import float32, silu
from mega_fairseq.modules.mixers.mega import DampedEMA

BLOCK = 32  # tokens
MOST_ERROR = 1e-6  # of a kernel with fewer poles, relative to its largest number
CUT_OFF = 1e-8  # of singular values: without it, weights of 1e5 cancel
NEAR, FAR, STEPS = 64, 8192, 200  # all lags below NEAR count, and so many up to FAR


class Poles(NamedTuple):
    """Decays phi and weights c, both (D, N), of the kernels of one direction, in float64."""

    decays: np.ndarray
    weights: np.ndarray

    @property
    def states(self) -> int:
        return self.weights.shape[1]

    def kernel(self, lags: np.ndarray) -> np.ndarray:
        """K_t for lags t (T,): (D, T)."""
        return np.einsum("dn,dnt->dt", self.weights, self.decays[..., None] ** lags)


def poles(ema: DampedEMA) -> List[Poles]:
    """The kernels of each direction, with as few poles as give them."""
    log_decay, expand, project = (t.detach().double().cpu().numpy() for t in ema.coefficients())
    return [reduced(Poles(np.exp(d), e * p)) for d, e, p in zip(log_decay, expand, project)]


def reduced(full: Poles) -> Poles:
    """The same kernels, up to MOST_ERROR, with the smallest number of their poles.

    For each channel: poles are chosen one by one, always that whose powers are farthest from the span of those chosen,
    and then weights by least squares. (Choosing the pole that fits best gives weights that cancel each other.)
    """
    lags = np.concatenate([np.arange(NEAR), np.unique(np.geomspace(NEAR, FAR, STEPS).round())])
    gaps = np.sqrt(np.diff(lags, append=lags[-1] + 1))
    powers = full.decays[..., None] ** lags  # (D, N, T)
    columns = np.linalg.qr((powers * gaps).transpose(0, 2, 1), mode="r")  # (D, N, N)
    kernel = (full.weights[:, None] @ powers)[:, 0]
    scale = np.abs(kernel).max(1, keepdims=True)
    order = _farthest_first(columns)
    for count in range(1, order.shape[1]):
        chosen = order[:, :count]
        inverse = np.linalg.pinv(np.take_along_axis(columns, chosen[:, None], 2), rcond=CUT_OFF)  # (D, n, N)
        weights = inverse @ (columns @ full.weights[..., None])
        found = (weights.transpose(0, 2, 1) @ np.take_along_axis(powers, chosen[..., None], 1))[:, 0]
        if (np.abs(found - kernel) <= MOST_ERROR * scale).all():
            return Poles(np.take_along_axis(full.decays, chosen, 1), weights[..., 0])
    return full


def _farthest_first(columns: np.ndarray) -> np.ndarray:
    """Columns (D, ., N), each next one farthest from the span of those before -> their numbers (D, N)."""
    rest, order = columns.copy(), []
    for _ in range(columns.shape[2]):
        sizes = np.linalg.norm(rest, axis=1)  # (D, N)
        if order:
            np.put_along_axis(sizes, np.stack(order, 1), -1.0, 1)
        order.append(sizes.argmax(1))
        unit = np.take_along_axis(rest, order[-1][:, None, None], 2)  # (D, ., 1)
        unit /= np.maximum(np.linalg.norm(unit, axis=1, keepdims=True), np.finfo(np.float64).tiny)
        rest -= unit * (unit * rest).sum(1, keepdims=True)
    return np.stack(order, 1)


# ------------------------------------------------------------------------------------------- single tokens


def ema_token(g: Graph, x: Value, state: Value, order: Value, causal: Poles, omega: Tensor) -> Tuple[Value, Value]:
    """x (R, D) -> silu(EMA(x) + omega x) and the next states (R, N, D); row r continues row order[r] of `state`."""
    decays, weights = (float32(t.T) for t in causal)  # (N, D): D is the innermost dimension of all arithmetic
    state = g.op("Gather", state, order) * decays + x.unsqueeze(1) * weights
    return silu(g, state.sum(1) + x * float32(omega)), state


# ------------------------------------------------------------------------------------------- whole sequences


def ema_both_directions(
    g: Graph, x: Value, forward: Poles, backward: Poles, omega: Tensor, truncation: Optional[int] = None
) -> Value:
    """x (S, m, D), zeros at pads, -> silu(EMA(x) + omega x), of the past and of the future.

    A kernel that ends after T taps is the whole one less one that starts T steps later: c phi^(t - T) with c phi^T.
    """
    y = _sums(g, x, forward, backward, float32(omega))
    if truncation:
        length, start = x.sizes(1, 2), g.constant(np.array([0]))
        later = [kernel._replace(weights=kernel.weights * kernel.decays**truncation) for kernel in (forward, backward)]
        of_past = g.op("Pad", _sums(g, x, later[0], None), np.array([0, truncation, 0, 0, 0, 0]))
        of_future = g.op("Pad", _sums(g, x, None, later[1]), np.array([0, 0, 0, 0, truncation, 0]))
        stop = length + truncation
        y = y - of_past.slice(start, length, 1) - of_future.slice(np.array([truncation]), stop, 1)
    return silu(g, y)


def _sums(
    g: Graph, x: Value, forward: Optional[Poles], backward: Optional[Poles], omega: Optional[np.ndarray] = None
) -> Value:
    """The EMAs of x (S, m, D) in the directions that are given, and omega x."""
    kernels, added, read = [], [], []  # added (D, C, N): from a token to a state, read (D, N, C): to outputs
    if forward is not None:
        kernels.append(forward)
        added.append(_powers(g, forward, BLOCK - 1, -1))
        read.append(_powers(g, forward, 1, 1, by_state=True))
    if backward is not None:
        kernels.append(backward)
        added.append(_powers(g, backward, 0, 1))
        read.append(_powers(g, backward, BLOCK, -1, by_state=True))
    table = _toeplitz(g, _outputs_in_block(forward, backward, omega))
    products = _in_blocks(g, x) @ g.concat(table, *added)  # (D, S n, .)
    inside, *to_states = products.split(BLOCK, *(kernel.states for kernel in kernels))
    directions = [0] * (forward is not None) + [1] * (backward is not None)
    entering = _entering(g, x, to_states, kernels, directions)[0]
    return _in_order(g, inside + g.concat(*entering) @ g.concat(*read, axis=1), x)


def ema_of_past(g: Graph, x: Value, state: Value, causal: Poles, omega: Tensor) -> Tuple[Value, Value]:
    """x (1, n, D) after a state (N, D) -> silu(EMA(x) + omega x), and the state after x."""
    table, added = _outputs_in_block(causal, None, float32(omega)), _powers(g, causal, BLOCK - 1, -1)
    blocks = _in_blocks(g, x)
    inside, to_states = (blocks @ g.concat(_toeplitz(g, table), added)).split(BLOCK, causal.states)
    (entering,), last = _entering(g, x, [to_states], [causal], [0], state)
    y = inside + entering @ _powers(g, causal, 1, 1, by_state=True)
    # The last block has r real tokens, 1 to C: they add to the state as the last r of a whole block do.
    count = x.sizes(1, 2)
    rest = g.op("Mod", count - 1, BLOCK) + 1  # (1,)
    tokens = g.op("Transpose", x.slice(count - rest, count, 1), perm=(2, 0, 1))  # (D, 1, r)
    new = tokens @ added.slice(g.constant(np.array([BLOCK])) - rest, np.array([BLOCK]), 1)  # (D, 1, N)
    decays = g.op("Gather", float32(causal.decays[..., None] ** np.arange(BLOCK + 1)), rest, axis=2)  # (D, N, 1)
    state = last.reshape(0, -1) * decays.reshape(0, -1) + new.reshape(0, -1)  # (D, N)
    return silu(g, _in_order(g, y, x)), state.transpose(1, 0)


def _outputs_in_block(forward: Optional[Poles], backward: Optional[Poles], omega: Optional[np.ndarray]) -> np.ndarray:
    """What a token adds to the output at each distance from -(C - 1) to C - 1 after it: (D, 2C - 1)."""
    lags, dim = np.arange(BLOCK), len((forward or backward).weights)
    taps = np.zeros((dim, 2 * BLOCK - 1))
    if forward is not None:
        taps[:, BLOCK - 1 :] += forward.kernel(lags)
    if backward is not None:
        taps[:, BLOCK - 1 :: -1] += backward.kernel(lags)
    if omega is not None:
        taps[:, BLOCK - 1] += omega
    return float32(taps)


def _toeplitz(g: Graph, taps: np.ndarray) -> Value:
    """(D, C, C) from token j to output i. ONNX Runtime computes it once, when it loads the graph."""
    token, output = np.mgrid[:BLOCK, :BLOCK]
    return g.op("Gather", taps, output - token + BLOCK - 1, axis=1)


def _powers(g: Graph, of: Poles, first: int, step: int, by_state: bool = False) -> Value:
    """phi^t for t = first, first + step, ... : (D, N, C) if `by_state`, or times c as (D, C, N). Computed once, too."""
    lags = np.arange(first, first + step * BLOCK, step, dtype=np.float32)
    logs = np.log(np.maximum(of.decays, np.finfo(np.float32).tiny))
    if by_state:
        return g.op("Exp", g.constant(float32(logs[:, :, None])) * lags)
    return g.op("Exp", g.constant(float32(logs[:, None])) * lags[:, None]) * float32(of.weights[:, None])


def _in_blocks(g: Graph, x: Value) -> Value:
    """(S, m, D) -> (D, S n, C), with zeros up to whole blocks."""
    missing = g.op("Mod", g.constant(np.array([0])) - x.sizes(1, 2), BLOCK)
    ends = g.concat(np.array([0, 0, 0, 0]), missing, np.array([0]), axis=0)
    padded = g.op("Pad", x, ends)
    return padded.transpose(2, 0, 1).reshape(0, -1, BLOCK)


def _in_order(g: Graph, y: Value, x: Value) -> Value:
    """(D, S n, C) -> (S, m, D), as x."""
    sources = g.concat(np.array([0]), x.sizes(0, 1), np.array([-1]), axis=0)
    return g.op("Reshape", y, sources).transpose(1, 2, 0).slice(np.array([0]), x.sizes(1, 2), 1)


def _entering(
    g: Graph,
    x: Value,
    added: List[Value],
    kernels: List[Poles],
    directions: List[int],
    state: Optional[Value] = None,
) -> Tuple[List[Value], Value]:
    """From what each block adds to the states (D, S n, N), the states before each block, for each direction.

    Direction 1 is backward. `state` (N, D) is that before the first block. Also returns the last state of the first
    direction (D, S, N).
    """
    sources = g.concat(np.array([0]), x.sizes(0, 1), np.array([-1]), axis=0)
    inputs, starts, body, inner, outer = [], [], [], [], []
    for number, (of_blocks, kernel) in enumerate(zip(added, kernels)):
        by_block = g.op("Reshape", of_blocks, g.concat(sources, np.array([kernel.states]), axis=0))  # (D, S, n, N)
        inputs.append(by_block.transpose(2, 0, 1, 3))
        starts.append(_zeros_like(g, inputs[-1]) if state is None else state.transpose(1, 0).unsqueeze(1))
        decay = g.constant(float32(kernel.decays[:, None] ** BLOCK))  # (D, 1, N)
        body += [
            helper.make_node("Mul", [f"state{number}", decay.name], [f"kept{number}"]),
            helper.make_node("Add", [f"kept{number}", f"new{number}"], [f"after{number}"]),
            helper.make_node("Identity", [f"state{number}"], [f"before{number}"]),
        ]
        inner += [_info(f"state{number}"), _info(f"new{number}")]
        outer += [_info(f"after{number}"), _info(f"before{number}")]
    scan = helper.make_graph(body, "blocks", inner[::2] + inner[1::2], outer[::2] + outer[1::2])
    attributes = {"num_scan_inputs": len(inputs), "body": scan}
    attributes.update(scan_input_directions=directions, scan_output_directions=directions)
    found = g.op("Scan", *starts, *inputs, outputs=2 * len(inputs), **attributes)[len(inputs) :]
    last = g.op("Gather", found[0], -1, axis=0)
    return [states.transpose(1, 2, 0, 3).reshape(0, -1, k.states) for states, k in zip(found, kernels)], last


def _info(name: str) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, None)


def _zeros_like(g: Graph, by_block: Value) -> Value:
    """(D, S, N) for (n, D, S, N)."""
    return g.op("Expand", np.zeros((1, 1, 1), np.float32), by_block.sizes(1))
