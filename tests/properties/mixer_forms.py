"""The examples of all token mixers at sizes where a sequence of thousands of tokens has many chunks."""

from dataclasses import fields, replace

import torch

from mega_fairseq.modules import EXAMPLES, Mixer

DIM, CHUNK = 32, 256
SIZES = {"shared_dim": 32, "value_dim": 64, "chunk_size": CHUNK, "stride": 64, "summary": 8, "reach": 32}


def build(name: str, causal: bool = True) -> Mixer:
    """An example whose sizes are real and whose parameters are as large as after some training."""
    torch.manual_seed(0)
    example = EXAMPLES[name]
    sizes = {f.name: SIZES[f.name] for f in fields(example) if f.name in SIZES and getattr(example, f.name)}
    if example.is_unused("summary"):
        del sizes["summary"]
    if getattr(example, "position_bias", None) == "simple":
        sizes["position_bias"] = "t5"  # for any length
    mixer = replace(example, dim=DIM, init="scaled", causal=causal, **sizes).build().eval()
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return mixer


def is_unbounded(name: str) -> bool:
    """Whether its state grows with the number of tokens."""
    return any(str(shape[:1]).endswith("so far',)") for shape in EXAMPLES[name].build().state_shapes().values())
