"""Reference layers, written only from the paper's equations: one sequence, one token, one key at a time.

They are slow and simple. They use only the parameters and the config of a module, and none of its code.
"""

import math
from typing import Callable, List, Optional

import torch
from torch import Tensor, nn

from mega_fairseq.modules import DampedEMA, GatedCrossAttention, MovingAverageGatedAttention, NormalizedFeedForward

silu = torch.nn.functional.silu


def per_sequence(layer: Callable[..., Tensor], *modules: nn.Module) -> Callable[[Tensor, Optional[Tensor]], Tensor]:
    """Applies `layer(*modules, row)` to each row's real tokens (n, D), with outputs in the layout of x (B, L, D)."""

    def batched(x: Tensor, mask: Optional[Tensor] = None) -> Tensor:
        out = torch.zeros_like(x)
        for i in range(x.size(0)):
            real = torch.ones(x.size(1), dtype=torch.bool) if mask is None else ~mask[i]
            if real.any():
                out[i, real] = layer(*modules, x[i, real])
        return out

    return batched


# ------------------------------------------------------------------------------------------- EMA, eq. 3-5


def ema(module: DampedEMA, x: Tensor) -> Tensor:
    """silu(EMA(x) + omega x) for x (n, D), both directions if the module has two."""
    mixed = module.omega * x + _one_direction(module, 0, x)
    if module.bidirectional:
        mixed = mixed + _one_direction(module, 1, x.flip(0)).flip(0)
    return silu(mixed)


def _one_direction(module: DampedEMA, direction: int, x: Tensor) -> Tensor:
    alpha, delta = torch.sigmoid(module.alpha[direction]), torch.sigmoid(module.delta[direction])  # (D, N)
    beta, eta = module.beta[direction], module.eta[direction] * math.sqrt(1.0 / module.ndim)
    outputs = []
    for t in range(len(x)):
        first = 0 if not module.truncation else max(0, t + 1 - module.truncation)  # only the last taps count
        h = torch.zeros_like(beta)
        for s in range(first, t + 1):
            h = alpha * (beta * x[s].unsqueeze(-1)) + (1.0 - alpha * delta) * h
        outputs.append((eta * h).sum(-1))
    return torch.stack(outputs)


# ------------------------------------------------------------------------------------------- attention, eq. 11


def _rotated(x: Tensor, position: int) -> Tensor:
    half = len(x) // 2
    out = []
    for i in range(len(x)):
        angle = position * 10000.0 ** (-(i % half) / half)
        other = -x[i + half] if i < half else x[i - half]
        out.append(x[i] * math.cos(angle) + other * math.sin(angle))
    return torch.stack(out)


def _bucket(distance: int, causal: bool) -> int:
    """T5's bucket of key position minus query position."""
    buckets, offset = 32, 0
    if not causal:
        buckets = 16
        offset = 16 if distance > 0 else 0
    reach, exact = (max(0, -distance) if causal else abs(distance)), buckets // 2
    if reach < exact:
        return offset + reach
    return offset + min(buckets - 1, exact + int(math.log(reach / exact) / math.log(128 / exact) * (buckets - exact)))


def _bias(module: nn.Module, kind: str, query: int, key: int, causal: bool):
    """b_rel for two positions."""
    bias = module.position_bias
    if kind == "simple":
        return bias.weight[len(bias.weight) // 2 + key - query]  # distance 0 is in the middle
    if kind == "rotary":
        return (_rotated(bias.a, query) * _rotated(bias.b, key)).sum()
    if kind == "alibi":
        return -abs(query - key) / 256.0
    return bias.weight[_bucket(key - query, causal)] if kind == "t5" else 0.0


def _attend(module: nn.Module, queries: List[Tensor], keys: List[Tensor], values: Tensor, causal: bool) -> Tensor:
    """f(Q K^T / tau + b_rel) V with queries and keys counted from position 0: (n, e)."""
    c = module.config
    outputs = []
    for i, query in enumerate(queries):
        seen = range(i + 1) if causal else range(len(keys))
        tau = math.sqrt(c.shared_dim) if c.attention == "softmax" else float(len(seen))
        scores = []
        for j in seen:
            q, k = (_rotated(query, i), _rotated(keys[j], j)) if c.position_bias == "rope" else (query, keys[j])
            scores.append((q * k).sum() / tau + _bias(module, c.position_bias, i, j, causal))
        s = torch.stack(scores)
        if c.attention == "softmax":
            weights = torch.exp(s - s.max()) / torch.exp(s - s.max()).sum()
        elif c.attention == "relu2":
            weights = torch.relu(s) ** 2
        else:
            weights = 0.5 * (1.0 + torch.erf((s - 0.707107) / (0.282095 * math.sqrt(2.0))))
        outputs.append(sum(weights[n] * values[j] for n, j in enumerate(seen)))
    return torch.stack(outputs)


# ------------------------------------------------------------------------------------------- norms and activations


def norm(module: nn.Module, x: Tensor) -> Tensor:
    """A SequenceNorm in evaluation, for x (n, D)."""
    weight, bias = getattr(module.norm, "weight", None), getattr(module.norm, "bias", None)
    if module.kind == "layernorm":
        y = (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, unbiased=False, keepdim=True) + 1e-5)
    elif module.kind in ("scalenorm", "rmsnorm"):
        y = x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5)
    else:
        y = (x - module.norm.running_mean) / torch.sqrt(module.norm.running_var + 1e-5)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def _gelu_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


ACTIVATIONS = {
    "silu": lambda x: x * torch.sigmoid(x),
    "relu": lambda x: x.clamp_min(0.0),
    "gelu": lambda x: 0.5 * x * (1.0 + torch.erf(x / math.sqrt(2.0))),
    "gelu_fast": _gelu_tanh,
    "gelu_accurate": _gelu_tanh,
    "linear": lambda x: x,
}


def _project(linear: nn.Linear, x: Tensor) -> Tensor:
    return x @ linear.weight.t() + linear.bias


# ------------------------------------------------------------------------------------------- layers


def gated_attention(module: MovingAverageGatedAttention, x: Tensor) -> Tensor:
    """Eq. 6-15 for x (n, D)."""
    c, act = module.config, ACTIVATIONS[module.config.activation]
    normed = norm(module.norm, x) if c.prenorm else x
    averaged = ema(module.ema, normed)  # X'
    shared = silu(_project(module.shared, averaged))  # Z
    queries, keys = (shared * module.kappa[i] + module.mu[i] for i in (0, 1))
    values = act(_project(module.values, normed))  # V, from X
    chunk = c.chunk_size or len(x)
    attended = torch.cat(
        [
            _attend(module, list(queries[s : s + chunk]), list(keys[s : s + chunk]), values[s : s + chunk], c.causal)
            for s in range(0, len(x), chunk)
        ]
    )
    update, reset, candidate = _project(module.gates, averaged).split([c.dim, c.value_dim, c.dim], -1)
    candidate = act(candidate + _project(module.hidden, silu(reset) * attended))
    gate = torch.sigmoid(update)
    y = gate * candidate + (1.0 - gate) * x
    return y if c.prenorm else norm(module.norm, y)


def cross_attention(module: GatedCrossAttention, source: Tensor, x: Tensor) -> Tensor:
    """Target x (n, D), source (m, S) -> (n, D)."""
    c, act = module.config, ACTIVATIONS[module.config.activation]
    normed = norm(module.norm, x) if c.prenorm else x
    queries, keys = _project(module.queries, normed), _project(module.keys, source)
    attended = _attend(module, list(queries), list(keys), act(_project(module.values, source)), False)
    update, reset = _project(module.gates, normed).split(c.dim, -1)
    candidate = act(_project(module.hidden, silu(reset) * attended))
    y = x + torch.sigmoid(update) * (candidate - x)
    return y if c.prenorm else norm(module.norm, y)


def feed_forward(module: NormalizedFeedForward, x: Tensor) -> Tensor:
    c = module.config
    normed = norm(module.norm, x) if c.prenorm else x
    y = x + _project(module.contract, ACTIVATIONS[c.activation](_project(module.expand, normed)))
    return y if c.prenorm else norm(module.norm, y)


MIXERS = {"mega": gated_attention}  # the reference of each token mixer
