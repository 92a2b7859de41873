"""The layers that are measured: ours, torch's Transformer layer, the textbook EMA, and mega-pytorch if installed."""

import math
from typing import Callable, Dict, Optional

import torch
from torch import Tensor, nn

from mega_fairseq.modules import GatedAttentionConfig, MovingAverageGatedAttention

DIM, SHARED, VALUES, NDIM, CHUNK = 512, 128, 1024, 16, 128

MEGA = {
    "chunk128_causal_rotary": {"chunk_size": CHUNK, "causal": True, "position_bias": "rotary"},
    "chunk128_bidir_simple": {"chunk_size": CHUNK, "causal": False, "position_bias": "simple"},
    "full_causal_rotary": {"chunk_size": None, "causal": True, "position_bias": "rotary"},
    "full_bidir_simple": {"chunk_size": None, "causal": False, "position_bias": "simple"},
}


def mega(name: str, length: int) -> nn.Module:
    return MovingAverageGatedAttention(
        GatedAttentionConfig(DIM, shared_dim=SHARED, value_dim=VALUES, ndim=NDIM, max_positions=length, **MEGA[name])
    )


def torch_layer() -> nn.Module:
    """torch's own layer on its fused attention, feed-forward of 2048 included; dropout off, as in the others."""
    return nn.TransformerEncoderLayer(DIM, 8, 2048, dropout=0.0, batch_first=True)


class Projections(nn.Module):
    """The matrix products of our layer with all else left out: the floor that it stands on."""

    def __init__(self) -> None:
        super().__init__()
        self.values, self.inner = nn.Linear(DIM, VALUES), nn.Linear(DIM, SHARED + VALUES + 2 * DIM)
        self.hidden = nn.Linear(VALUES, DIM)

    def forward(self, x: Tensor) -> Tensor:
        values, inner = self.values(x), self.inner(x)
        # Gradients of ones reach every product; the sums cost next to nothing.
        return self.hidden(values).sum() + inner.sum()


def mega_pytorch(causal: bool = True) -> Optional[nn.Module]:
    """PyPI's mega-pytorch at the same widths, or None where it is not installed. It has no chunks."""
    try:
        from mega_pytorch.mega_pytorch import MegaLayer
    except ImportError:
        return None
    return MegaLayer(dim=DIM, ema_heads=NDIM, attn_dim_qk=SHARED, attn_dim_value=VALUES, causal=causal)


def textbook_ema(x: Tensor, alpha: Tensor, delta: Tensor, beta: Tensor, eta: Tensor, omega: Tensor) -> Tensor:
    """The EMA as the paper's appendix writes it: all D x N x L powers, then an FFT of twice the length. x (B, L, D)."""
    length = x.size(1)
    weight = torch.sigmoid(alpha)
    decay = 1.0 - weight * torch.sigmoid(delta)
    powers = torch.exp(torch.arange(length, device=x.device) * torch.log(decay).unsqueeze(-1))  # (D, N, L)
    kernel = torch.einsum("dnl,dn->dl", weight.mul(beta).unsqueeze(-1) * powers, eta * math.sqrt(1.0 / eta.size(-1)))
    n = 2 * length
    spectrum = torch.fft.rfft(x.transpose(1, 2), n) * torch.fft.rfft(kernel, n)
    return torch.fft.irfft(spectrum, n)[..., :length].transpose(1, 2) + omega * x


def training_step(module: Callable[[Tensor], Tensor], batch: int, length: int) -> Callable[[], None]:
    """Forward and backward, input gradient included, as one call."""
    x = torch.randn(batch, length, DIM, requires_grad=True)

    def step() -> None:
        y = module(x)
        (y[0] if isinstance(y, tuple) else y).sum().backward()
        x.grad = None
        if isinstance(module, nn.Module):
            module.zero_grad(set_to_none=True)

    return step


def layers(length: int, with_full: bool, with_torch: bool) -> Dict[str, nn.Module]:
    chosen = {"torch": torch_layer()} if with_torch else {}
    chosen.update({name: mega(name, length) for name in MEGA if with_full or name.startswith("chunk")})
    return chosen
