"""Reference forms of the token mixers other than Mega, from their equations, key by key (see reference.py)."""

import math
from typing import List, Tuple, Union

import torch
from torch import Tensor, nn

from mega_fairseq.ops.sparse import visible_places
from tests.properties.reference import (
    ACTIVATIONS,
    gated_attention,
    in_chunks,
    project,
    rotated,
    silu,
    timestep_norm,
    token_mixer,
)


def _mapped(module: nn.Module, h: Tensor, row: int) -> Tensor:
    return silu(project(module.shared, h)) * module.kappa[row] + module.mu[row]


def _gated(module: nn.Module, h: Tensor, x: Tensor, attended: Tensor) -> Tensor:
    return x + project(module.output, silu(project(module.gate, h)) * attended)


@token_mixer
def gau(module: nn.Module, h: Tensor, x: Tensor) -> Tensor:
    values = silu(project(module.values, h))
    return _gated(module, h, x, in_chunks(module, _mapped(module, h, 0), _mapped(module, h, 1), values))


@token_mixer
def flash(module: nn.Module, h: Tensor, x: Tensor) -> Tensor:
    """Each token reads the keys of finished chunks, or of the whole sequence, one by one."""
    c, values = module.config, silu(project(module.values, h))
    quad = in_chunks(module, _mapped(module, h, 0), _mapped(module, h, 1), values)
    queries, keys = _mapped(module, h, 2), _mapped(module, h, 3)
    if c.position_bias == "rope":
        queries, keys = (torch.stack([rotated(row, t) for t, row in enumerate(t)]) for t in (queries, keys))
    outputs = []
    for t in range(len(x)):
        seen = t - t % c.chunk_size if c.causal else len(x)
        read = sum(((queries[t] * keys[u]).sum() * values[u] for u in range(seen)), torch.zeros_like(values[0]))
        outputs.append(read / max(1, seen))
    return _gated(module, h, x, quad + torch.stack(outputs))


def _partly_rotated(module: nn.Module, row: Tensor, place: int) -> Tensor:
    dims = module.config.rotary_dims
    return torch.cat([rotated(row[:dims], place), row[dims:]]) if dims else row


@token_mixer
def sparse(module: nn.Module, h: Tensor, x: Tensor) -> Tensor:
    c, outputs = module.config, []
    window, width = c.chunk_size or len(h), c.dim // c.heads
    queries, keys, values = (project(p, h) for p in (module.query, module.key, module.value))
    visible = visible_places(c.sparsity, c.heads, window)  # the definition, which golden cases verify
    for t in range(len(h)):
        start, heads = t - t % window, []
        for head in range(c.heads):
            own = slice(head * width, (head + 1) * width)
            seen = [start + u for u in visible[head, t - start].nonzero().flatten().tolist() if start + u < len(h)]
            if not seen:
                heads.append(torch.zeros_like(values[t, own]))
                continue
            query = _partly_rotated(module, queries[t, own], t - start)
            rotated_keys = [_partly_rotated(module, keys[u, own], u - start) for u in seen]
            scores = torch.stack([(query * key).sum() / width**0.5 for key in rotated_keys])
            heads.append(sum(w * values[u, own] for w, u in zip(torch.softmax(scores, 0), seen)))
        outputs.append(torch.cat(heads))
    return x + project(module.output, torch.stack(outputs))


# ------------------------------------------------------------------------------------------- tables over places


def _time(module: nn.Module, name: str, head: int, query: int, key: int) -> Tensor:
    """The entry of a table over t - u."""
    table = getattr(module, name)[head]
    return table[query - key if module.config.causal else query - key + len(table) // 2]


def _entry(module: nn.Module, name: str, *index: int) -> Union[Tensor, float]:
    """The entry of a table over places, 1 without it."""
    table = getattr(module, name, None)
    return 1.0 if table is None else table[index]


def _window(module: nn.Module, t: int, length: int) -> Tuple[range, int]:
    """The tokens that t sees, and the first token of its window."""
    c = module.config
    size = c.chunk_size or length
    start = t - t % size
    return range(start, t + 1 if c.causal else min(length, start + size)), start


@token_mixer
def attention(module: nn.Module, h: Tensor, x: Tensor) -> Tensor:
    c, width = module.config, module.config.dim // module.config.heads
    queries, keys, values = (project(p, h) for p in (module.query, module.key, module.value))

    def weights(t: int, head: int, seen: range, start: int) -> List[Tensor]:
        own, scores = slice(head * width, (head + 1) * width), []
        query = _partly_rotated(module, queries[t, own], t - start)
        for u in seen:
            score = (query * _partly_rotated(module, keys[u, own], u - start)).sum() / math.sqrt(width)
            if c.time_weight == "before":
                score = score + _time(module, "log_weight", head, t, u)
                score = score + (module.log_beta[head, u - start] if c.beta else 0.0)
            scores.append(score)
        result = list(torch.softmax(torch.stack(scores), 0))
        if c.time_weight == "after":
            for i, u in enumerate(seen):
                place = _entry(module, "alpha", head, t - start) * _entry(module, "beta", head, u - start)
                result[i] = result[i] * _time(module, "time_weight", head, t, u) * place
        return result

    outputs = []
    for t in range(len(x)):
        seen, start = _window(module, t, len(x))
        of_heads = [torch.stack(weights(t, head, seen, start)) for head in range(c.heads)]
        if c.talking_heads:
            of_heads = [sum(module.talking[a, b] * of_heads[b] for b in range(c.heads)) for a in range(c.heads)]
        parts = [of_heads[a] @ values[list(seen), a * width : (a + 1) * width] for a in range(c.heads)]
        outputs.append(torch.cat(parts) * _entry(module, "gamma", t - start))
    return x + project(module.output, torch.stack(outputs))


@token_mixer
def aft(module: nn.Module, h: Tensor, x: Tensor) -> Tensor:
    """Each channel of a token reads the channel of each key that it sees."""
    c, outputs = module.config, []
    keys, values = project(module.key, h), project(module.value, h)
    for t in range(len(h)):
        (seen, start), channels = _window(module, t, len(h)), []
        for i in range(c.dim):
            head, logits = i * c.heads // c.dim, []
            for u in seen:
                near = c.form == "window" or (c.form == "local" and abs(t - u) < c.reach)
                logits.append(keys[u, i] + (_time(module, "log_weight", head, t, u) if near else 0.0))
                logits[-1] = logits[-1] + (module.log_beta[head, u - start] if c.beta else 0.0)
            shares = torch.softmax(torch.stack(logits), 0)
            channels.append(sum(share * values[u, i] for share, u in zip(shares, seen)))
        gate = torch.sigmoid(project(module.receptance, h[t])) * _entry(module, "gamma", t - start)
        outputs.append(gate * torch.stack(channels))
    return x + project(module.output, torch.stack(outputs))


@token_mixer
def gmlp(module: nn.Module, h: Tensor, x: Tensor) -> Tensor:
    c, outputs = module.config, []
    gelu, width = ACTIVATIONS["gelu"], c.expansion * c.dim // c.heads
    values = gelu(project(module.value, h))
    if c.value_norm:
        centred = values - values.mean(-1, keepdim=True)
        values = centred / torch.sqrt((centred * centred).mean(-1, keepdim=True) + 1e-5)
        values = values * module.value_norm.weight + module.value_norm.bias
    for t in range(len(x)):
        seen, start = _window(module, t, len(x))
        parts = []
        for head in range(c.heads):
            part = torch.zeros_like(values[0, :width])
            for u in seen:
                weight = _time(module, "time_weight", head, t, u) * _entry(module, "alpha", head, t - start)
                part = part + weight * _entry(module, "beta", head, u - start) * values[u, head * width :][:width]
            parts.append(part + (module.spatial_bias[head, t - start] if c.spatial_bias else 0.0))
        outputs.append(_entry(module, "gamma", t - start) * torch.cat(parts))
    return x + project(module.output, gelu(project(module.receptance, h)) * torch.stack(outputs))


def megalodon(module: nn.Module, x: Tensor) -> Tensor:
    """Each token reads the complex states of all channels, and then the keys of its chunk."""
    c, outputs = module.config, []
    h, width = x, c.shared_dim // c.heads
    if c.token_shift:  # before the norm
        before = torch.cat([torch.zeros_like(x[:1]), x[:-1]])
        h = torch.cat([before[:, : c.dim // 2], x[:, c.dim // 2 :]], 1)
    normed = timestep_norm(module.norm, h)
    alpha, delta = torch.sigmoid(module.cema.alpha), torch.sigmoid(module.cema.delta)
    phi = torch.sigmoid(module.cema.theta).unsqueeze(-1) * torch.arange(1, c.ndim + 1) * 2 * math.pi / c.ndim
    gamma, state = torch.view_as_complex(module.cema.gamma), torch.zeros(c.dim, c.ndim, dtype=torch.complex128)
    averaged = []
    for t in range(len(x)):
        state = torch.polar(1 - alpha * delta, phi) * state + alpha * normed[t].unsqueeze(-1)
        averaged.append((gamma * state).sum(-1).real / math.sqrt(c.ndim) + module.cema.omega * normed[t])
    m = torch.stack(averaged)
    m = m / torch.sqrt((m * m).mean(-1, keepdim=True) + 1e-5) * (1 + module.averaged_norm.weight)
    values, shared = silu(project(module.values, normed)), project(module.shared, m).unflatten(-1, (c.heads, -1))
    shared = (shared / torch.sqrt((shared * shared).mean(-1, keepdim=True) + 1e-5)).flatten(-2)
    queries, keys = (shared * (1 + module.kappa[i]) / math.sqrt(width) + module.mu[i] for i in (0, 1))
    for t in range(len(x)):
        (seen, start), parts = _window(module, t, len(x)), []
        for head in range(c.heads):
            own, of_values = (slice(head * w, (head + 1) * w) for w in (width, c.value_dim // c.heads))
            query = rotated(queries[t, own], t - start)
            scores = torch.stack([(query * rotated(keys[u, own], u - start)).sum() for u in seen])
            parts.append(torch.softmax(scores, 0) @ values[list(seen), of_values])
        outputs.append(torch.cat(parts))
    gated = torch.stack(outputs) * silu(project(module.gate, m))
    return x + project(module.direct, m) + gated @ module.hidden.weight.t()


MIXERS = {
    "megalodon": megalodon,
    "mega": gated_attention,
    "gau": gau,
    "flash": flash,
    "sparse": sparse,
    "attention": attention,
    "aft": aft,
    "gmlp": gmlp,
}
