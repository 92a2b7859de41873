"""The layers to measure: each token mixer with its feed-forward layer, torch's Transformer layer and a Llama-like one.

All have the parameters of torch's layer within 2%: the feed-forward layer is as wide as that takes. GAU and FLASH have
none, so theirs are two layers.
"""

from functools import lru_cache
from typing import Any, Dict, List

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.measure import Step
from mega_fairseq.modules import MIXERS, Block, FeedForwardConfig, MixerConfig

DIM, SHARED, VALUES, NDIM, HEADS = 512, 128, 1024, 16, 8  # widths of mega_transformer_base
FEED_FORWARD, SWIGLU = 2144, 1432  # widths of the feed-forward parts of torch's and the Llama-like layer
WINDOW, FLASH_CHUNK, STRIDE, REACH = 512, 256, 64, 32
LONGEST_QUADRATIC = 8192  # beyond it, full attention takes minutes per step

CAUSAL = {"mixer": "mega", "position_bias": "rotary", "shared_dim": SHARED, "value_dim": VALUES, "ndim": NDIM}
BIDIRECTIONAL = {**CAUSAL, "causal": False, "position_bias": "simple", "max_positions": LONGEST_QUADRATIC}
UNIT = {"position_bias": "rope", "shared_dim": SHARED, "value_dim": VALUES}
MEGALODON = {"mixer": "megalodon", "shared_dim": SHARED, "value_dim": VALUES, "ndim": NDIM}
ROPE = {"mixer": "attention", "heads": HEADS, "rotary_dims": 32}
SPARSE = {"mixer": "sparse", "stride": STRIDE, "heads": HEADS, "rotary_dims": 32}

# name -> mixer and its options
MEGA: Dict[str, Dict[str, Any]] = {
    "Mega, causal, chunks of 128": {**CAUSAL, "chunk_size": 128},
    "Mega, bidirectional, chunks of 128": {**BIDIRECTIONAL, "chunk_size": 128},
    "Mega, causal, full attention": CAUSAL,
    "Mega, bidirectional, full attention": BIDIRECTIONAL,
}
OTHERS: Dict[str, Dict[str, Any]] = {
    "Mega, chunks": {**CAUSAL, "chunk_size": WINDOW},
    "GAU, full": {"mixer": "gau", **UNIT},
    "GAU, windows": {"mixer": "gau", "chunk_size": WINDOW, **UNIT},
    "FLASH": {"mixer": "flash", "chunk_size": FLASH_CHUNK, **UNIT},
    "attention, full": ROPE,
    "attention, windows": {**ROPE, "chunk_size": WINDOW},
    "time weighting before": {**ROPE, "chunk_size": WINDOW, "time_weight": "before", "beta": True, "gamma": True},
    "time weighting after": {**ROPE, "chunk_size": WINDOW, "time_weight": "after", "alpha": True, "beta": True},
    "gMLP": {"mixer": "gmlp", "chunk_size": WINDOW, "heads": HEADS, "expansion": 2},
    "AFT": {"mixer": "aft", "chunk_size": WINDOW, "heads": HEADS},
    "AFT-local": {"mixer": "aft", "form": "local", "reach": REACH, "heads": HEADS},
    "sparse, strided": {**SPARSE, "pattern": "strided"},
    "sparse, fixed": {**SPARSE, "pattern": "fixed", "summary": 8},
    "Megalodon, chunks": {**MEGALODON, "chunk_size": WINDOW},
}
LAYERS = {**MEGA, **OTHERS}
TRANSFORMER, CAUSAL_TRANSFORMER = "Transformer layer of torch", "causal Transformer layer of torch"
LLAMA = "Llama-like layer"
GROUPS = {"mega": [TRANSFORMER, *MEGA], "mixers": [CAUSAL_TRANSFORMER, *OTHERS]}


class TransformerLayer(nn.Module):
    """torch's layer on its fused attention, without dropout like the others."""

    def __init__(self, causal: bool):
        super().__init__()
        self.causal = causal
        self.layer = nn.TransformerEncoderLayer(DIM, HEADS, FEED_FORWARD, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        if not self.causal:
            return self.layer(x)
        mask = future(x.device)[: x.size(1), : x.size(1)]
        return self.layer(x, src_mask=mask, is_causal=True)


@lru_cache(maxsize=None)
def future(device: torch.device) -> Tensor:
    """The mask, which torch asks for although its fused attention does not read it; made before the measurements."""
    return nn.Transformer.generate_square_subsequent_mask(LONGEST_QUADRATIC, device)


class LlamaLayer(nn.Module):
    """RMSNorm, fused causal attention and SwiGLU, without biases; for speed, so positions are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(DIM) for _ in range(2))
        self.attention, self.output = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.gated, self.down = nn.Linear(DIM, 2 * SWIGLU, bias=False), nn.Linear(SWIGLU, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.attention(self.norms[0](x)).unflatten(-1, (3, HEADS, -1))  # (B, L, 3, H, D / H)
        attended = F.scaled_dot_product_attention(*heads.transpose(1, 3).unbind(2), is_causal=True)  # (B, H, L, D / H)
        x = x + self.output(attended.transpose(1, 2).flatten(2))
        gate, values = self.gated(self.norms[1](x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * values)


class Stack(nn.Module):
    """Blocks one after the other, without a state."""

    def __init__(self, blocks: List[Block]):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            x = x[0] if block.causal else x
        return x


def layer(name: str) -> nn.Module:
    if name in (TRANSFORMER, CAUSAL_TRANSFORMER):
        return TransformerLayer(name == CAUSAL_TRANSFORMER)
    if name == LLAMA:
        return LlamaLayer()
    config = mixer(name)
    if name.startswith(("GAU", "FLASH")):
        return Stack([Block(config), Block(config)])
    missing = size_of(TransformerLayer(False)) - size_of(Block(config))
    width = missing // (2 * DIM + 1) // 8 * 8  # GPUs multiply matrices of other widths at half the speed
    return Stack([Block(config, FeedForwardConfig(DIM, hidden_dim=width))])


def mixer(name: str, **options: Any) -> MixerConfig:
    options = {**LAYERS[name], **options}
    return MIXERS[options.pop("mixer")](DIM, **options)


def size_of(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def fitting(names: List[str], length: int) -> List[str]:
    """Without those whose attention is full, if the sequence is too long for it."""
    linear = [name for name in names if "Transformer" not in name and "full" not in name]
    return names if length <= LONGEST_QUADRATIC else linear


def layer_step(
    name: str, length: int, tokens: int, dtype: torch.dtype = torch.float32, device: Any = "cpu", form: str = ""
) -> Step:
    """Forward and backward of a layer on as many sequences as make `tokens`, or one if it is longer.

    Forms other than an eager layer are "compiled" and, on a GPU, "graphs".
    """
    module = layer(name).to(device, dtype)
    x = torch.randn(max(1, tokens // length), length, DIM, dtype=dtype, device=device, requires_grad=True)
    run = module
    if form == "compiled":
        torch._dynamo.reset()  # or it would be compiled for all lengths so far
        run = torch.compile(module)
    elif form == "graphs":
        run = torch.cuda.make_graphed_callables(module, (x,))

    tensors = [x, *module.parameters()]

    def step() -> None:
        run(x).sum().backward()
        for tensor in tensors:
            tensor.grad = None

    return step
