"""Reference forms of the token mixers other than Mega, from their equations, key by key (see reference.py)."""

import torch
from torch import Tensor, nn

from tests.properties.reference import gated_attention, in_chunks, project, rotated, silu, token_mixer


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


MIXERS = {"mega": gated_attention, "gau": gau, "flash": flash}
