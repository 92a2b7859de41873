"""The released code's tensor names and layouts and ours.

Every rule is linear, so gradients translate like parameters. The released EMA swaps the names alpha and delta, keeps a
trailing axis of 1 and stacks both directions on one axis. Released projections of the same input are one matrix.
"""

from typing import Dict, Mapping, Tuple

import torch
from torch import Tensor

# Ends of names: (released, ours).
RENAMED: Tuple[Tuple[str, str], ...] = (
    ("norm.scalar", "norm.weight"),
    ("move.omega", "ema.omega"),
    ("rel_pos_bias.rel_pos_bias", "position_bias.weight"),
    ("v_proj.weight", "values.weight"),
    ("v_proj.bias", "values.bias"),
    ("k_proj.weight", "keys.weight"),
    ("k_proj.bias", "keys.bias"),
    ("h_proj.weight", "hidden.weight"),
    ("h_proj.bias", "hidden.bias"),
    ("fc1.weight", "expand.weight"),
    ("fc1.bias", "expand.bias"),
    ("fc2.weight", "contract.weight"),
    ("fc2.bias", "contract.bias"),
    ("project_in_dim.weight", "embed_tokens.project.weight"),
)
EMA_NAMES = {"delta": "alpha", "alpha": "delta", "beta": "beta", "gamma": "eta"}
# Parts of a model, anywhere in a name.
PARTS = {"mega_layer": "mixer", "cross_attn": "cross_attention", "nffn": "feed_forward"}
VERSIONS = (
    "encoder.version",
    "decoder.version",
)  # read by nothing, unlike that of an adaptive softmax


def translate(released: Mapping[str, Tensor]) -> Dict[str, Tensor]:
    """Translate a released state dict, or gradients under its names, to our names and layout."""
    ours: Dict[str, Tensor] = {}
    for name, tensor in released.items():
        prefix, _, leaf = name.rpartition(".")
        if leaf == "_float_tensor" or name in VERSIONS:  # `_float_tensor` is uninitialised memory
            continue
        stem = prefix + "." if prefix else ""
        if prefix.endswith("move") and leaf in EMA_NAMES:
            ours[f"{_parent(prefix)}ema.{EMA_NAMES[leaf]}"] = ema_tensor(tensor, released[f"{stem}omega"].numel())
        elif prefix.endswith("rel_pos_bias") and leaf in ("alpha", "beta"):
            ours[f"{_parent(prefix)}position_bias.{'a' if leaf == 'alpha' else 'b'}"] = tensor.reshape(-1)
        elif prefix.endswith("mx_proj"):
            update, shared, reset, candidate = tensor.split(_mx_rows(released, _parent(prefix)))
            ours[f"{_parent(prefix)}gates.{leaf}"] = torch.cat([update, reset, candidate])
            ours[f"{_parent(prefix)}shared.{leaf}"] = shared.clone()  # saving a view would save the whole matrix
        elif prefix.endswith("q_proj"):
            width = released[f"{_parent(prefix)}h_proj.bias"].numel()
            update, reset, queries = tensor.split([width, width, tensor.size(0) - 2 * width])
            ours[f"{_parent(prefix)}gates.{leaf}"] = torch.cat([update, reset])
            ours[f"{_parent(prefix)}queries.{leaf}"] = queries.clone()
        elif leaf in ("gamma", "beta"):
            ours[f"{stem}{'kappa' if leaf == 'gamma' else 'mu'}"] = tensor
        else:
            ours[_renamed(name)] = tensor
    return {".".join(PARTS.get(part, part) for part in name.split(".")): tensor for name, tensor in ours.items()}


def ema_tensor(tensor: Tensor, dim: int) -> Tensor:
    """(directions D, N, 1) or (directions D, N) -> (directions, D, N)."""
    return tensor.reshape(-1, dim, tensor.size(1))


def _mx_rows(released: Mapping[str, Tensor], stem: str) -> Tuple[int, int, int, int]:
    dim, width = released[f"{stem}h_proj.weight"].shape
    return dim, released[f"{stem}gamma"].size(1), width, dim


def _parent(prefix: str) -> str:
    parent = prefix.rpartition(".")[0]
    return parent + "." if parent else ""


def _renamed(name: str) -> str:
    for released, ours in RENAMED:
        if name == released or name.endswith("." + released):
            return name[: -len(released)] + ours
    return name
