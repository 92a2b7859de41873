"""The norms of a block, for sequences (B, L, D)."""

from typing import Optional

import torch
from torch import Tensor, nn

from mega_fairseq.ops.precision import at_least_float32


class ScaleNorm(nn.Module):
    """g x / rms(x) with one learned g (the released form of Nguyen & Salazar's g x / |x|)."""

    def __init__(self, dim: int, eps: float, affine: bool):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(self._width(dim))) if affine else None

    def _width(self, dim: int) -> int:
        return 1

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(at_least_float32(x.dtype))  # squares overflow in half precision
        y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (y if self.weight is None else y * self.weight).to(x.dtype)


class RMSNorm(ScaleNorm):
    """g . x / rms(x) with one learned g per dimension."""

    def _width(self, dim: int) -> int:
        return dim


class SequenceNorm(nn.Module):
    """One of NORMS over (B, L, D); batchnorm ignores pads in its statistics."""

    def __init__(self, kind: str, dim: int, eps: float = 1e-5, affine: bool = True):
        super().__init__()
        if kind not in NORMS:
            raise ValueError(f"norm is {kind!r}; choose one of {', '.join(NORMS)}")
        self.kind = kind
        self.norm = NORMS[kind](dim, eps, affine)

    def forward(self, x: Tensor, padding_mask: Optional[Tensor] = None) -> Tensor:
        if self.kind not in BATCH_NORMS:
            return self.norm(x)
        if padding_mask is None or not self.training:
            return self.norm(x.flatten(0, 1)).view(x.shape)
        real = (~padding_mask).flatten().nonzero().squeeze(1)  # found once: on a GPU, each use of a mask would wait
        rows = x.flatten(0, 1)
        return torch.zeros_like(rows).index_copy(0, real, self.norm(rows.index_select(0, real))).view(x.shape)


def _layer_norm(dim: int, eps: float, affine: bool) -> nn.Module:
    return nn.LayerNorm(dim, eps=eps, elementwise_affine=affine)


NORMS = {
    "layernorm": _layer_norm,
    "scalenorm": ScaleNorm,
    "rmsnorm": RMSNorm,
    "batchnorm": lambda dim, eps, affine: nn.BatchNorm1d(dim, eps=eps, affine=affine),
    "syncbatchnorm": lambda dim, eps, affine: nn.SyncBatchNorm(dim, eps=eps, affine=affine),
}
BATCH_NORMS = ("batchnorm", "syncbatchnorm")
