"""Gated cross attention in a graph: the source once for each sentence, and single target tokens."""

from typing import NamedTuple, Optional, Tuple

import numpy as np
from onnx import TensorProto

from mega_fairseq.export.attention import at_least_one, distances, rotated, rotation, scaled, weights
from mega_fairseq.export.graph import Graph, Value
from mega_fairseq.export.layers import ACTIVATIONS, float32, gate, norm, project
from mega_fairseq.modules import GatedCrossAttention
from mega_fairseq.ops.attention.scores import MASKED
from mega_fairseq.ops.attention.segments import NEAR


class Limits(NamedTuple):
    """The longest source and target, in tokens."""

    source: int
    target: int


class Source(NamedTuple):
    """What target tokens see of their sources (S, m)."""

    mask: Value  # (S, 1, m) 0, or MASKED at pads
    position: Value  # (1,) of the new target tokens
    places: Optional[Value]  # (S, b, m) numbers in `place_table`, for models that attend by line


def place_distances(module: GatedCrossAttention, limits: Limits) -> Tuple[int, int]:
    """The first distance of offsets in the table of places, and how many there are."""
    longest = module.position_bias.longest
    first, stop = 1 - (longest or limits.target), longest or limits.source
    return first, stop - first


def _place_table(g: Graph, module: GatedCrossAttention, limits: Limits) -> Value:
    """The bias of each pair of places: a row of distances of offsets for each distance of lines, and in the end MASKED.

    ONNX Runtime adds them once, when it loads the graph.
    """
    first, width = place_distances(module, limits)
    table = distances(module.position_bias, first, first + width)
    table = np.zeros(width, np.float32) if table is None else table
    scores = np.zeros(2 * NEAR + 1, np.float32) if module.segment_scores is None else float32(module.segment_scores)
    return g.concat((g.constant(table) + scores[:, None]).reshape(-1), np.array([MASKED], np.float32))


def source_keys_values(g: Graph, x: Value, module: GatedCrossAttention, places: Value, limits: Limits):
    """The encoder's output (S, m, D') -> keys (S, z, m), transposed for the step, and values (S, m, D)."""
    c = module.config
    keys, values = project(g, x, module.keys, module.values).split(c.shared_dim, c.dim)
    angles = rotation(module.position_bias, c.shared_dim, limits.source)
    keys = keys if angles is None else rotated(g, keys, angles, places)
    return keys.transpose(0, 2, 1), ACTIVATIONS[c.activation](g, values)


def cross_attend(
    g: Graph, x: Value, keys: Value, values: Value, module: GatedCrossAttention, source: Source, limits: Limits
) -> Tuple[Value, Value]:
    """Target tokens x (R, D) with keys (S, z, m), values (S, m, D) -> (R, D), weights of attention (S, b, m).

    The rows of a sentence are one product.
    """
    c = module.config
    y = norm(g, x, module.norm) if c.prenorm else x
    queries, *gates = project(g, y, module.queries, module.gates).split(c.shared_dim, c.dim, c.dim)
    if c.attention == "softmax":
        queries = queries * c.shared_dim**-0.5
    angles = rotation(module.position_bias, c.shared_dim, limits.target)
    queries = queries if angles is None else rotated(g, queries, angles, source.position)

    def visible(keys: Value) -> Value:
        return at_least_one(g, g.op("Cast", keys, to=TensorProto.FLOAT))

    beams = g.op("Reshape", queries, g.concat(keys.sizes(0, 1), np.array([-1, c.shared_dim]), axis=0))
    scores = beams @ keys  # (S, b, z) (S, z, m)
    if source.places is not None:
        hidden = (2 * NEAR + 1) * place_distances(module, limits)[1]
        scores = scaled(scores, c.attention, lambda: visible(g.op("Less", source.places, hidden)))
        scores = scores + g.op("Gather", _place_table(g, module, limits), source.places)
    else:
        scores = scaled(scores, c.attention, lambda: visible(g.op("Equal", source.mask, np.float32(0.0))))
        reach = max(limits)
        table = distances(module.position_bias, 1 - reach, reach)
        if table is not None:
            start = g.constant(np.array([reach - 1])) - source.position
            scores = scores + g.constant(table).slice(start, start + keys.sizes(2, 3), 0)
        scores = scores + source.mask
    looks = weights(g, scores, c.attention)
    attended = (looks @ values).reshape(-1, c.dim)
    y = gate(g, gates, attended, x, module.hidden, c.activation)
    return (y if c.prenorm else norm(g, y, module.norm)), looks
