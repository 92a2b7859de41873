"""Mega's self-attention in a graph (eq. 7-11): in an encoder, for a token after a tree of others, and for a text.

f(Q K^T / tau + b_rel) V for f = softmax, or for relu2 and laplace, where tau is the number of keys that a query sees.
Places count from the start of a chunk, or of the text.
"""

import math
from typing import Any, Callable, NamedTuple, Optional, Tuple

import numpy as np
import torch
from onnx import TensorProto

from mega_fairseq.export.graph import Graph, Value
from mega_fairseq.export.layers import float32, silu
from mega_fairseq.modules.mixers.mega import MovingAverageGatedAttention
from mega_fairseq.modules.position_bias import PositionBias, RotaryEmbedding
from mega_fairseq.ops.attention.position import cos_sin_naive
from mega_fairseq.ops.attention.scores import LAPLACE_MEAN, LAPLACE_STD, MASKED

ZERO = np.array([0])  # a vector of one integer

# ------------------------------------------------------------------------------------------- weights of attention


def weights(g: Graph, scores: Value, function: str) -> Value:
    """f(scores) over the last dimension; MASKED scores give 0."""
    if function == "softmax":
        return g.op("Softmax", scores, axis=-1)
    if function == "relu2":
        positive = g.op("Relu", scores)
        return positive * positive
    return (g.op("Erf", (scores - LAPLACE_MEAN) / (LAPLACE_STD * math.sqrt(2.0))) + 1.0) * 0.5


def scaled(scores: Value, function: str, seen: Callable[[], Value]) -> Value:
    """Products over tau; for softmax, tau is in the queries already."""
    return scores if function == "softmax" else scores / seen()


def distances(bias: PositionBias, first: int, stop: int) -> Optional[np.ndarray]:
    """b_rel for key minus query position from `first` to `stop` - 1, or None."""
    with torch.no_grad():
        table = bias(first, stop, torch.device("cpu"))
    return None if table is None else float32(table)


def rotation(bias: PositionBias, width: int, longest: int) -> Optional[Tuple[np.ndarray, np.ndarray]]:
    """Cosines and sines (longest, z / 2) by place, for RoPE; None for other biases."""
    if not isinstance(bias, RotaryEmbedding):
        return None
    return tuple(float32(t) for t in cos_sin_naive(torch.arange(longest), width, torch.float32))


def rotated(g: Graph, x: Value, angles: Tuple[np.ndarray, np.ndarray], places: Value) -> Value:
    """R_i x for the place i of each row: x (..., n, z), places (n,)."""
    cos, sin = (g.op("Gather", table, places) for table in angles)
    half = angles[0].shape[1]
    first, second = x.split(half, half)
    return g.concat(first * cos - second * sin, second * cos + first * sin)


def queries_and_keys(g: Graph, shared: Value, mixer: MovingAverageGatedAttention) -> Tuple[Value, Value]:
    """Q and K from the projection of X' (eq. 7-9), with the scale of softmax in Q.

    Softmax ignores what is the same for all keys, so keys are Z itself, kappa_1 moves into the queries, and mu_1 falls
    away. Not so for other functions, and for RoPE, which rotates keys.
    """
    z, c = silu(g, shared), mixer.config
    (kappa_q, kappa_k), (mu_q, mu_k) = float32(mixer.kappa), float32(mixer.mu)
    scale = np.float32(c.shared_dim**-0.5 if c.attention == "softmax" else 1.0)
    if c.attention == "softmax" and not isinstance(mixer.position_bias, RotaryEmbedding):
        return z * (kappa_q * kappa_k * scale) + mu_q * kappa_k * scale, z
    return z * (kappa_q * scale) + mu_q * scale, z * kappa_k + mu_k


def count(g: Graph, size: Value) -> Value:
    """0, 1, ... below a vector of one integer."""
    return g.op("Range", 0, g.op("Squeeze", size, np.array([0])), 1)


class Chunks:
    """Cuts sequences (S, m, .) into chunks (S n, w, .) of w = min(c, m) tokens; without c, they stay whole."""

    def __init__(self, g: Graph, length: Value, size: Optional[int]):
        self.g, self.length, self.size = g, length, size
        self.width = length if size is None else g.op("Min", length, np.array([size]))
        self.missing = g.op("Mod", g.constant(ZERO) - length, self.width)

    def cut(self, x: Value, *dims: int, before: Any = ZERO) -> Value:
        """x (S, m, *dims), or with `before` blanks in front of each sequence."""
        if self.size is None:
            return x
        rest = np.zeros(len(dims), np.int64)
        ends = self.g.concat(ZERO, before, rest, ZERO, self.missing, rest, axis=0)
        shape = self.g.concat(np.array([-1]), self.width, np.array(dims, np.int64), axis=0)
        return self.g.op("Reshape", self.g.op("Pad", x, ends), shape)

    def join(self, x: Value, dim: int, start: Any = ZERO) -> Value:
        """(S n, w, dim) -> (S, m, dim) from `start` on."""
        if self.size is None:
            return x
        whole = self.g.concat(np.array([-1]), self.length + self.missing, np.array([dim]), axis=0)
        return self.g.op("Reshape", x, whole).slice(start, self.length, 1)


# ------------------------------------------------------------------------------------------- both directions


def attend_both_directions(
    g: Graph, q: Value, k: Value, v: Value, mixer: MovingAverageGatedAttention, real: Value, longest: int
) -> Value:
    """q, k (S, m, z), v (S, m, e), real (S, m), 1 or 0 -> (S, m, e), in chunks or not."""
    c, reach = mixer.config, mixer.config.chunk_size or longest
    chunks = Chunks(g, q.sizes(1, 2), c.chunk_size)
    q, k, v = (chunks.cut(t, width) for t, width in ((q, c.shared_dim), (k, c.shared_dim), (v, c.value_dim)))
    real, places = chunks.cut(real).unsqueeze(1), count(g, chunks.width)
    angles = rotation(mixer.position_bias, c.shared_dim, reach)
    if angles is not None:
        q, k = (rotated(g, t, angles, places) for t in (q, k))
    scores = scaled(q @ k.transpose(0, 2, 1), c.attention, lambda: at_least_one(g, real))
    table = distances(mixer.position_bias, 1 - reach, reach)
    if table is not None:
        scores = scores + g.op("Gather", table, places.unsqueeze(0) - places.unsqueeze(1) + (reach - 1))
    return chunks.join(weights(g, scores + (real - 1.0) * -MASKED, c.attention) @ v, c.value_dim)


def at_least_one(g: Graph, visible: Value) -> Value:
    """The number of keys that each query sees, of (., ., m), 1 or 0: (., ., 1), for the division by it."""
    return g.op("Max", visible.sum(2, keep=True), np.float32(1.0))


# ------------------------------------------------------------------------------------------- a token after a tree


class Tree(NamedTuple):
    """The tokens that the rows of a step may see: n places for each sentence, which its b rows share."""

    mask: Value  # (S, b, n) 0, or MASKED for places that a row does not see
    distance: Value  # (S, n) from each place to the new tokens, 1 or more at places that a row sees
    place: Value  # (1,) of the new tokens


def attend_tree(
    g: Graph, q: Value, k: Value, v: Value, keys: Value, values: Value, mixer: MovingAverageGatedAttention, tree: Tree,
    longest: int,
) -> Tuple[Value, Value]:  # fmt: skip
    """The tokens of R = S b rows: q, k (R, z), v (R, e) after keys (S, n, z), values (S, n, e) -> (R, e), key to keep.

    The new key and value are never joined with the earlier ones, which would copy these.
    """
    function, reach = mixer.config.attention, mixer.config.chunk_size or longest
    angles = rotation(mixer.position_bias, mixer.config.shared_dim, reach)
    if angles is not None:
        q, k = (rotated(g, t, angles, tree.place) for t in (q, k))
    by_source = tree.mask.sizes(0, 2)  # S, b

    def beams(x: Value, width: int) -> Value:
        """(R, width) -> (S, b, width)"""
        return g.op("Reshape", x, g.concat(by_source, np.array([width]), axis=0))

    def seen() -> Value:
        return g.op("Cast", tree.place + 1, to=TensorProto.FLOAT)

    own = scaled((q * k).sum(1, keep=True), function, seen)  # (R, 1)
    scores = scaled(beams(q, mixer.config.shared_dim) @ keys.transpose(0, 2, 1), function, seen) + tree.mask
    table = distances(mixer.position_bias, 1 - reach, 1)
    if table is not None:
        table = table[::-1].copy()  # by distance back
        scores, own = scores + g.op("Gather", table, tree.distance).unsqueeze(1), own + table[:1]
    sizes = g.concat(tree.mask.sizes(2), np.array([1]), axis=0)
    both = weights(g, g.concat(scores, beams(own, 1)), function)
    of_tree, of_own = g.op("Split", both, sizes, outputs=2, axis=-1)
    attended = of_tree @ values + of_own * beams(v, mixer.config.value_dim)
    return attended.reshape(-1, mixer.config.value_dim), k


# ------------------------------------------------------------------------------------------- a piece of a text


def attend_past(
    g: Graph, q: Value, k: Value, v: Value, keys: Value, values: Value, mixer: MovingAverageGatedAttention, longest: int
) -> Tuple[Value, Value, Value]:
    """q, k (1, n, z), v (1, n, e) after the unfinished chunk, keys (1, m, z), values (1, m, e) -> (1, n, e).

    Also returns the keys and values of the chunk that is unfinished after it.
    """
    c, before = mixer.config, keys.sizes(1, 2)
    reach = c.chunk_size or longest
    angles = rotation(mixer.position_bias, c.shared_dim, reach)
    if angles is not None:
        places = count(g, q.sizes(1, 2)) + before
        places = places if c.chunk_size is None else g.op("Mod", places, c.chunk_size)
        q, k = (rotated(g, t, angles, places) for t in (q, k))
    keys, values = g.concat(keys, k, axis=1), g.concat(values, v, axis=1)  # (1, m + n, .)
    total = keys.sizes(1, 2)
    if c.chunk_size is None:  # the queries are the last n tokens
        chunks, k, v = Chunks(g, q.sizes(1, 2), None), keys, values
        query, key = count(g, q.sizes(1, 2)) + before, count(g, total)
    else:  # with blanks for the queries of the first m tokens
        chunks = Chunks(g, total, c.chunk_size)
        q, k, v = (
            chunks.cut(q, c.shared_dim, before=before),
            chunks.cut(keys, c.shared_dim),
            chunks.cut(values, c.value_dim),
        )
        query = key = count(g, chunks.width)
    back = query.unsqueeze(1) - key.unsqueeze(0)
    seen = query.unsqueeze(1) + 1
    scores = scaled(q @ k.transpose(0, 2, 1), c.attention, lambda: g.op("Cast", seen, to=TensorProto.FLOAT))
    table = distances(mixer.position_bias, 1 - reach, 1)
    if table is not None:
        scores = scores + g.op("Gather", table[::-1].copy(), g.op("Max", back, 0))
    scores = g.op("Where", g.op("Less", back, 0), np.float32(MASKED), scores)
    attended = chunks.join(weights(g, scores, c.attention) @ v, c.value_dim, before)
    if c.chunk_size is None:
        return attended, keys, values
    start = total - g.op("Mod", total, c.chunk_size)
    return attended, keys.slice(start, total, 1), values.slice(start, total, 1)
