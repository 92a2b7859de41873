"""What all parts of a graph use: norms, activations, projections of modules, gates and feed-forward layers."""

import math
from typing import Any, List, Optional

import numpy as np
import torch
from torch import Tensor, nn

from mega_fairseq.export.graph import Graph, Value
from mega_fairseq.modules import NormalizedFeedForward, SequenceNorm
from mega_fairseq.modules.feed_forward import GATED
from mega_fairseq.modules.normalization import BATCH_NORMS, ElementwiseScale, RMSNorm
from mega_fairseq.ops.activations import GELU_SIGMOID
from mega_fairseq.ops.gates.naive import RESET_ACTIVATION


def float32(values: Any) -> np.ndarray:
    """A tensor, parameter or array as a contiguous array of float32."""
    values = values.detach().cpu().numpy() if isinstance(values, Tensor) else values
    return np.array(values, np.float32, order="C")


# ------------------------------------------------------------------------------------------- activations


def silu(g: Graph, x: Value) -> Value:
    return x * g.op("Sigmoid", x)


def _gelu(g: Graph, x: Value) -> Value:
    return x * (g.op("Erf", x * math.sqrt(0.5)) + 1.0) * 0.5


def _gelu_tanh(g: Graph, x: Value) -> Value:
    inner = (x + x * x * x * 0.044715) * math.sqrt(2.0 / math.pi)
    return x * (g.op("Tanh", inner) + 1.0) * 0.5


ACTIVATIONS = {
    "silu": silu,
    "relu": lambda g, x: g.op("Relu", x),
    "gelu": _gelu,
    "gelu_fast": _gelu_tanh,
    "gelu_accurate": _gelu_tanh,
    "gelu_sigmoid": lambda g, x: x * g.op("Sigmoid", x * GELU_SIGMOID),
    "linear": lambda g, x: x,
}


# ------------------------------------------------------------------------------------------- norms


def norm(g: Graph, x: Value, module: Optional[SequenceNorm]) -> Value:
    """x (..., D); None stands for no norm."""
    if module is None:
        return x
    inner = module.norm
    weight, bias = (None if p is None else float32(p) for p in (inner.weight, getattr(inner, "bias", None)))
    if module.kind in BATCH_NORMS:
        scale = torch.rsqrt(inner.running_var.double() + inner.eps).cpu().numpy()
        scale = scale if weight is None else scale * weight
        shift = -inner.running_mean.double().cpu().numpy() * scale
        return x * float32(scale) + float32(shift if bias is None else shift + bias)
    if isinstance(inner, ElementwiseScale):
        return x if weight is None else x * weight
    if isinstance(inner, RMSNorm):
        mean = g.op("ReduceMean", x * x, axes=[-1], keepdims=1)
        y = x / g.op("Sqrt", mean + inner.eps)
        return y if weight is None else y * weight
    assert isinstance(inner, nn.LayerNorm)
    weight = np.ones(inner.normalized_shape, np.float32) if weight is None else weight
    return g.op("LayerNormalization", x, weight, *([] if bias is None else [bias]), axis=-1, epsilon=inner.eps)


# ------------------------------------------------------------------------------------------- projections


def project(g: Graph, x: Value, *layers: nn.Linear) -> Value:
    """x (..., in) through layers side by side -> (..., sum of their outputs)."""
    weight = np.concatenate([float32(layer.weight) for layer in layers])
    biases = [
        np.zeros(len(layer.weight), np.float32) if layer.bias is None else float32(layer.bias) for layer in layers
    ]
    return g.linear(x, weight, np.concatenate(biases))


def gate(g: Graph, parts: List[Value], attended: Value, residual: Value, hidden: nn.Linear, activation: str) -> Value:
    """Y = u H + (1 - u) X from the projections for u, r and, in self-attention, H (eq. 12-15)."""
    update, reset, *candidate = parts
    mixed = project(g, ACTIVATIONS[RESET_ACTIVATION](g, reset) * attended, hidden)
    mixed = ACTIVATIONS[activation](g, candidate[0] + mixed if candidate else mixed)
    return residual + g.op("Sigmoid", update) * (mixed - residual)


def feed_forward(g: Graph, x: Value, module: Optional[NormalizedFeedForward]) -> Value:
    """Y = X + W_2 f(W_1 X), with its norm (section 3.4)."""
    if module is None:
        return x
    c = module.config
    y = norm(g, x, module.norm) if c.prenorm else x
    activation = ACTIVATIONS[GATED.get(c.activation, c.activation)]
    if module.gate is None:
        hidden = activation(g, project(g, y, module.expand))
    else:
        expanded, values = project(g, y, module.expand, module.gate).split(c.hidden_dim, c.hidden_dim)
        hidden = activation(g, expanded) * values
    y = project(g, hidden, module.contract)
    y = x + (y if module.rescale is None else y * float32(module.rescale))
    return y if c.prenorm else norm(g, y, module.norm)
