"""Every form of every token mixer, at sizes where a sequence of thousands of tokens has many chunks."""

from typing import Any, Dict, Tuple

import torch

from mega_fairseq.modules import MIXERS, Mixer

DIM, CHUNK = 32, 256
_GATED = {"shared_dim": 32, "value_dim": 64, "chunk_size": CHUNK}
_GAU = {**_GATED, "position_bias": "rope"}
_HEADS = {"heads": 2, "chunk_size": CHUNK}
_TABLES = {**_HEADS, "beta": True, "gamma": True}
_SPARSE = {"heads": 2, "rotary_dims": 4, "stride": 64}

# name -> mixer and options
FORMS: Dict[str, Tuple[str, Dict[str, Any]]] = {
    "mega": ("mega", {**_GATED, "position_bias": "rotary", "ndim": 4}),
    "gau": ("gau", _GAU),
    "gau, inner scale": ("gau", {**_GAU, "scale": "inner"}),
    "gau, laplace": ("gau", {**_GAU, "attention": "laplace"}),
    "gau, softmax": ("gau", {**_GAU, "attention": "softmax"}),
    "gau, unbounded": ("gau", {**_GAU, "chunk_size": None}),
    "flash": ("flash", _GAU),
    "attention": ("attention", {**_HEADS, "rotary_dims": 4}),
    "attention, unbounded": ("attention", {"heads": 2, "rotary_dims": 4}),
    "attention, before": ("attention", {**_TABLES, "time_weight": "before"}),
    "attention, after": ("attention", {**_TABLES, "time_weight": "after", "alpha": True}),
    "attention, talking heads": ("attention", {**_TABLES, "time_weight": "after", "talking_heads": True}),
    "gmlp": ("gmlp", {**_TABLES, "alpha": True}),
    "gmlp, paper": ("gmlp", {**_HEADS, "value_norm": True, "spatial_bias": True}),
    "aft": ("aft", _TABLES),
    "aft, local": ("aft", {"form": "local", "reach": 32, "heads": 2}),
    "aft, simple": ("aft", {"form": "simple"}),
    "aft, ema": ("aft", {"form": "ema", "ndim": 4}),
    "sparse, strided": ("sparse", {**_SPARSE, "pattern": "strided"}),
    "sparse, fixed": ("sparse", {**_SPARSE, "pattern": "fixed", "summary": 8}),
    "sparse, windows": ("sparse", {**_SPARSE, "pattern": "strided", "chunk_size": CHUNK}),
}
# Whose state grows with the number of tokens.
UNBOUNDED = ("gau, unbounded", "attention, unbounded", "sparse, strided", "sparse, fixed")


def build(form: str, causal: bool = True) -> Mixer:
    """A mixer whose parameters are as large as after some training."""
    torch.manual_seed(0)
    name, options = FORMS[form]
    mixer = MIXERS[name](DIM, init="scaled", causal=causal, **options).build().eval()
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return mixer
