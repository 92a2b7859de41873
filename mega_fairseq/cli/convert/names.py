"""The released code's tensor names and layouts and ours.

Every rule is linear, so gradients translate like parameters. The released EMA swaps the names alpha and delta, keeps a
trailing axis of 1 and stacks both directions on one axis. Released projections of the same input are one matrix.
"""

import re
from typing import Dict, Mapping

import torch
from torch import Tensor

# Parts of a name, anywhere in it: released, ours.
PARTS = {
    "mega_layer": "mixer",
    "cross_attn": "cross_attention",
    "nffn": "feed_forward",
    "move": "ema",
    "rel_pos_bias": "position_bias",
    "v_proj": "values",
    "k_proj": "keys",
    "h_proj": "hidden",
    "fc1": "expand",
    "fc2": "contract",
    "project_in_dim": "embed_tokens.project",
}
# Last parts of a name, in the EMA, in a position bias and elsewhere.
OF_EMA = {"delta": "alpha", "alpha": "delta", "beta": "beta", "gamma": "eta"}
OF_BIAS = {"rel_pos_bias": "weight", "alpha": "a", "beta": "b"}
OTHERS = {"scalar": "weight", "gamma": "kappa", "beta": "mu"}
KAPPA_MU = {"kappa": "gamma", "mu": "beta"}
# The parts of a classifier around its layers; the head has the name that fairseq's tasks give it.
HEAD = "classification_heads.sentence_classification_head"
OF_CLASSIFIERS = {
    r"^encoder\.encoder\.": "encoder.",
    r"^(encoder\.embed_tokens)\.embed\.": r"\1.",
    r"^classifier\.(\d+)\.0\.": rf"{HEAD}.hidden.\1.",
    r"^sentence_projection_layer\.": f"{HEAD}.out.",
}
VERSIONS = ("encoder.version", "decoder.version")  # never read, unlike that of an adaptive softmax


def translate(released: Mapping[str, Tensor]) -> Dict[str, Tensor]:
    """Translate a released state dict, or gradients under its names, to our names and layout."""
    ours: Dict[str, Tensor] = {}
    for name, tensor in released.items():
        path, _, leaf = f".{name}".rpartition(".")
        parent, _, module = path.rpartition(".")
        if leaf == "_float_tensor" or name in VERSIONS:  # `_float_tensor` is uninitialised memory
            continue
        if module == "move" and leaf in OF_EMA:
            dim = released[f"{path}.omega"[1:]].numel()
            ours[f"{path}.{OF_EMA[leaf]}"] = tensor.reshape(-1, dim, tensor.size(1))  # (directions, D, N)
        elif module == "rel_pos_bias":
            ours[f"{path}.{OF_BIAS[leaf]}"] = tensor.reshape(-1)
        elif module == "mx_proj":
            dim, width = released[f"{parent}.h_proj.weight"[1:]].shape
            sizes = [dim, released[f"{parent}.gamma"[1:]].size(1), width, dim]
            update, shared, reset, candidate = tensor.split(sizes)
            ours[f"{parent}.gates.{leaf}"] = torch.cat([update, reset, candidate])
            ours[f"{parent}.shared.{leaf}"] = shared.clone()  # a saved view would contain the whole matrix
        elif module == "q_proj":
            width = released[f"{parent}.h_proj.bias"[1:]].numel()
            update, reset, queries = tensor.split([width, width, tensor.size(0) - 2 * width])
            ours[f"{parent}.gates.{leaf}"] = torch.cat([update, reset])
            ours[f"{parent}.queries.{leaf}"] = queries.clone()
        elif leaf == "num_batches_tracked":
            ours[path + ".num_batches_tracked"] = tensor.float()
        else:
            ours[f"{path}.{OTHERS.get(leaf, leaf)}"] = tensor
    return {_renamed(name[1:]): tensor for name, tensor in ours.items()}


def _renamed(name: str) -> str:
    name = ".".join(PARTS.get(part, part) for part in name.split("."))
    for released, ours in OF_CLASSIFIERS.items():
        name = re.sub(released, ours, name)
    return name


def translate_back(ours: Mapping[str, Tensor], scalar: bool) -> Dict[str, Tensor]:
    """The inverse of `translate` for layers without cross attention; `scalar`: whether norms are scalenorm."""
    released: Dict[str, Tensor] = {}
    for name, tensor in ours.items():
        path, _, leaf = name.rpartition(".")
        parent, _, module = path.rpartition(".")
        if module == "ema":
            stacked = tensor if leaf == "omega" else tensor.flatten(0, 1)  # (directions D, N)
            leaf = _inverse(OF_EMA).get(leaf, leaf)
            released[f"{path}.{leaf}"] = stacked.unsqueeze(-1) if leaf in ("alpha", "beta", "delta") else stacked
        elif module == "position_bias":
            leaf = _inverse(OF_BIAS)[leaf]
            released[f"{path}.{leaf}"] = tensor if leaf == "rel_pos_bias" else tensor.unsqueeze(0)
        elif module == "gates":
            dim, width = ours[f"{parent}.hidden.weight"].shape
            update, reset, candidate = tensor.split([dim, width, dim])
            released[f"{parent}.mx_proj.{leaf}"] = torch.cat(
                [update, ours[f"{parent}.shared.{leaf}"], reset, candidate]
            )
        elif leaf == "num_batches_tracked":
            released[name] = tensor.long()
        elif module == "norm" and scalar:
            released[f"{path}.scalar"] = tensor
        elif module != "shared":
            released[f"{path}.{KAPPA_MU.get(leaf, leaf)}"] = tensor
    parts = _inverse(PARTS)
    return {".".join(parts.get(part, part) for part in name.split(".")): tensor for name, tensor in released.items()}


def _inverse(names: Mapping[str, str]) -> Dict[str, str]:
    return {ours: released for released, ours in names.items()}
