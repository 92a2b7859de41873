"""The layers that are measured: ours, torch's Transformer layer, the textbook EMA, and mega-pytorch if installed."""

import math
from typing import Any, Callable, Optional

import torch
from torch import Tensor, nn

from mega_fairseq.modules import FeedForwardConfig, GatedAttentionConfig, MegaBlock, MovingAverageGatedAttention

DIM, SHARED, VALUES, NDIM, CHUNK = 512, 128, 1024, 16, 128  # widths of mega_transformer_base
HEADS = 8
EQUAL = 2144  # width of torch's feed-forward, with which its layer has the parameters of a Mega block, within 2%

MEGA = {
    "chunk128_causal_rotary": {"chunk_size": CHUNK, "causal": True, "position_bias": "rotary"},
    "chunk128_bidir_simple": {"chunk_size": CHUNK, "causal": False, "position_bias": "simple"},
    "full_causal_rotary": {"chunk_size": None, "causal": True, "position_bias": "rotary"},
    "full_bidir_simple": {"chunk_size": None, "causal": False, "position_bias": "simple"},
}
CHUNKED = [name for name in MEGA if name.startswith("chunk")]
# For figures and printed tables.
LABELS = {
    "torch": "Transformer layer of torch",
    "chunk128_causal_rotary": "Mega, causal, chunks of 128",
    "chunk128_bidir_simple": "Mega, bidirectional, chunks of 128",
    "full_causal_rotary": "Mega, causal, full attention",
    "full_bidir_simple": "Mega, bidirectional, full attention",
}


def layer(name: str, length: int) -> nn.Module:
    """A whole layer: gated attention and feed-forward, or torch's counterpart."""
    if name == "torch":
        return torch_layer()
    return MegaBlock(_attention(name, length), FeedForwardConfig(DIM, hidden_dim=VALUES))


def gated_attention(name: str, length: int, **options: Any) -> nn.Module:
    """Without feed-forward."""
    return MovingAverageGatedAttention(_attention(name, length, **options))


def _attention(name: str, length: int, **options: Any) -> GatedAttentionConfig:
    options = {**MEGA[name], "max_positions": length, **options}
    return GatedAttentionConfig(DIM, shared_dim=SHARED, value_dim=VALUES, ndim=NDIM, **options)


def torch_layer() -> nn.Module:
    """torch's Transformer layer, on its fused attention, without dropout like the others."""
    return nn.TransformerEncoderLayer(DIM, HEADS, EQUAL, dropout=0.0, batch_first=True)


def size_of(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


class Projections(nn.Module):
    """Only the matrix products of a Mega block: a lower bound of its time."""

    def __init__(self) -> None:
        super().__init__()
        self.values, self.inner = nn.Linear(DIM, VALUES), nn.Linear(DIM, SHARED + VALUES + 2 * DIM)
        self.hidden = nn.Linear(VALUES, DIM)
        self.expand, self.contract = nn.Linear(DIM, VALUES), nn.Linear(VALUES, DIM)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.inner(x)
        y = self.contract(self.expand(self.hidden(self.values(x))))
        # Gradients of ones reach every product; the sums cost next to nothing.
        return y.sum() + inner.sum()


def mega_pytorch(causal: bool = True) -> Optional[nn.Module]:
    """The gated attention of PyPI's mega-pytorch at the same widths, or None if not installed. It has no chunks."""
    try:
        from mega_pytorch.mega_pytorch import MegaLayer
    except ImportError:
        return None
    return MegaLayer(dim=DIM, ema_heads=NDIM, attn_dim_qk=SHARED, attn_dim_value=VALUES, causal=causal)


def textbook_ema(x: Tensor, alpha: Tensor, delta: Tensor, beta: Tensor, eta: Tensor, omega: Tensor) -> Tensor:
    """The EMA as in the paper's appendix: all D x N x L powers, then an FFT of twice the length. x (B, L, D)."""
    length = x.size(1)
    weight = torch.sigmoid(alpha)
    decay = 1.0 - weight * torch.sigmoid(delta)
    powers = torch.exp(torch.arange(length, device=x.device) * torch.log(decay).unsqueeze(-1))  # (D, N, L)
    kernel = torch.einsum("dnl,dn->dl", weight.mul(beta).unsqueeze(-1) * powers, eta * math.sqrt(1.0 / eta.size(-1)))
    n = 2 * length
    spectrum = torch.fft.rfft(x.transpose(1, 2), n) * torch.fft.rfft(kernel, n)
    return torch.fft.irfft(spectrum, n)[..., :length].transpose(1, 2) + omega * x


def training_step(
    module: Callable[[Tensor], Tensor], batch: int, length: int, dtype: Optional[torch.dtype] = None
) -> Callable[[], None]:
    """Forward and backward, input gradient included, as one call."""
    x = torch.randn(batch, length, DIM, dtype=dtype, requires_grad=True)

    def step() -> None:
        y = module(x)
        (y[0] if isinstance(y, tuple) else y).sum().backward()
        x.grad = None
        if isinstance(module, nn.Module):
            module.zero_grad(set_to_none=True)

    return step


SINGLE_TOKENS = 20  # in one call of `single_token`


def single_token(layer: Callable, rows: int, state: Any) -> Callable[[], None]:
    """A call that passes `SINGLE_TOKENS` tokens through a causal layer, one after the other, always from this state."""
    x = torch.randn(rows, 1, DIM)

    @torch.no_grad()
    def step() -> None:
        reached = state
        for _ in range(SINGLE_TOKENS):
            _, reached = layer(x, reached)

    return step
