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


def rotated(x: Tensor, position: int) -> Tensor:
    half = len(x) // 2
    out = []
    for i in range(len(x)):
        angle = position * 10000.0 ** (-(i % half) / half)
        other = -x[i + half] if i < half else x[i - half]
        out.append(x[i] * math.cos(angle) + other * math.sin(angle))
    return torch.stack(out)


def bucket(distance: int, causal: bool) -> int:
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
        return (rotated(bias.a, query) * rotated(bias.b, key)).sum()
    if kind == "alibi":
        return -abs(query - key) / 256.0
    return bias.weight[bucket(key - query, causal)] if kind == "t5" else 0.0


def _attend(module: nn.Module, queries: List[Tensor], keys: List[Tensor], values: Tensor, causal: bool) -> Tensor:
    """f(Q K^T / tau + b_rel) V with queries and keys counted from position 0: (n, e)."""
    c = module.config
    outputs = []
    for i, query in enumerate(queries):
        seen = range(i + 1) if causal else range(len(keys))
        outer = c.attention == "relu2" and getattr(c, "scale", "inner") == "outer"
        tau = math.sqrt(c.shared_dim) if outer or c.attention == "softmax" else float(len(seen))
        scores = []
        for j in seen:
            q, k = (rotated(query, i), rotated(keys[j], j)) if c.position_bias == "rope" else (query, keys[j])
            scores.append((q * k).sum() / tau + _bias(module, c.position_bias, i, j, causal))
        s = torch.stack(scores)
        if c.attention == "softmax":
            weights = torch.exp(s - s.max()) / torch.exp(s - s.max()).sum()
        elif c.attention == "relu2":
            weights = torch.relu(s) ** 2 / (len(seen) if outer else 1)
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
    elif module.kind == "hf_rmsnorm":
        y = x
    else:
        y = (x - module.norm.running_mean) / torch.sqrt(module.norm.running_var + 1e-5)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def timestep_norm(module: nn.Module, x: Tensor) -> Tensor:
    """The timestep norm of x (n, D): each token with the mean and variance of all numbers of a group so far."""
    outputs, groups = [], x.unflatten(-1, (module.groups, -1))  # (n, G, W)
    for t in range(len(x)):
        mean, seen = groups[: t + 1].mean((0, 2)).unsqueeze(-1), groups[: t + 1]
        var = (seen - mean).square().mean((0, 2)).unsqueeze(-1)
        outputs.append(((groups[t] - mean) / torch.sqrt(var + module.eps)).flatten())
    y = torch.stack(outputs)
    return y if module.weight is None else y * (1.0 + module.weight) + module.bias


def _gelu_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


ACTIVATIONS = {
    "silu": lambda x: x * torch.sigmoid(x),
    "relu": lambda x: x.clamp_min(0.0),
    "gelu": lambda x: 0.5 * x * (1.0 + torch.erf(x / math.sqrt(2.0))),
    "gelu_fast": _gelu_tanh,
    "gelu_accurate": _gelu_tanh,
    "gelu_sigmoid": lambda x: x * torch.sigmoid(1.702 * x),
    "linear": lambda x: x,
}


def project(linear: nn.Linear, x: Tensor) -> Tensor:
    return x @ linear.weight.t() + linear.bias


# ------------------------------------------------------------------------------------------- layers


def token_mixer(mix: Callable[[nn.Module, Tensor, Tensor], Tensor]) -> Callable[[nn.Module, Tensor], Tensor]:
    """The layer of `mix(module, h, x)`, which maps the normed and shifted h (n, D) and adds the residual x."""

    def layer(module: nn.Module, x: Tensor) -> Tensor:
        c = module.config
        h = norm(module.norm, x) if c.prenorm else x
        if c.token_shift:
            before = torch.cat([torch.zeros_like(h[:1]), h[:-1]])
            h = torch.cat([before[:, : c.dim // 2], h[:, c.dim // 2 :]], 1)
        y = mix(module, h, x)
        return y if c.prenorm else norm(module.norm, y)

    return layer


def in_chunks(module: nn.Module, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Single-head attention in chunks: (n, e)."""
    c, size = module.config, module.config.chunk_size or len(queries)
    chunks = [slice(start, start + size) for start in range(0, len(queries), size)]
    return torch.cat([_attend(module, list(queries[s]), list(keys[s]), values[s], c.causal) for s in chunks])


@token_mixer
def gated_attention(module: MovingAverageGatedAttention, h: Tensor, x: Tensor) -> Tensor:
    """Eq. 6-15 for x (n, D)."""
    c, act = module.config, ACTIVATIONS[module.config.activation]
    averaged = ema(module.ema, h)  # X'
    shared = silu(project(module.shared, averaged))  # Z
    queries, keys = (shared * module.kappa[i] + module.mu[i] for i in (0, 1))
    values = act(project(module.values, h))  # V, from X
    attended = in_chunks(module, queries, keys, values)
    update, reset, candidate = project(module.gates, averaged).split([c.dim, c.value_dim, c.dim], -1)
    candidate = act(candidate + project(module.hidden, silu(reset) * attended))
    gate = torch.sigmoid(update)
    return gate * candidate + (1.0 - gate) * x


def cross_attention(module: GatedCrossAttention, source: Tensor, x: Tensor) -> Tensor:
    """Target x (n, D), source (m, S) -> (n, D)."""
    c, act = module.config, ACTIVATIONS[module.config.activation]
    normed = norm(module.norm, x) if c.prenorm else x
    queries, keys = project(module.queries, normed), project(module.keys, source)
    attended = _attend(module, list(queries), list(keys), act(project(module.values, source)), False)
    update, reset = project(module.gates, normed).split(c.dim, -1)
    candidate = act(project(module.hidden, silu(reset) * attended))
    y = x + torch.sigmoid(update) * (candidate - x)
    return y if c.prenorm else norm(module.norm, y)


def feed_forward(module: NormalizedFeedForward, x: Tensor) -> Tensor:
    c = module.config
    normed = norm(module.norm, x) if c.prenorm else x
    if c.activation in ("geglu", "swiglu"):
        gate = ACTIVATIONS[{"geglu": "gelu", "swiglu": "silu"}[c.activation]]
        hidden = gate(project(module.expand, normed)) * project(module.gate, normed)
    else:
        hidden = ACTIVATIONS[c.activation](project(module.expand, normed))
    y = project(module.contract, hidden)
    y = x + (y if module.rescale is None else module.rescale * y)
    return y if c.prenorm else norm(module.norm, y)
