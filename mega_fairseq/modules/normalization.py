"""The norms of a block, for sequences (B, L, D)."""

from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mega_fairseq.ops.norm import layer_norm, normalized
from mega_fairseq.ops.precision import at_least_float32


class RMSNorm(nn.Module):
    """g . x / rms(x) with a learned g, (D,) or (1,): then the released form of Nguyen & Salazar's g x / |x|."""

    def __init__(self, width: int, eps: float, affine: bool):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width)) if affine else None

    def forward(self, x: Tensor) -> Tensor:
        return normalized(x, self.weight, None, self.eps, center=False)


class ElementwiseScale(nn.Module):
    """g . x with one learned g per dimension: the "rmsnorm" of Hugging Face's Mega, which does not normalise."""

    def __init__(self, dim: int, eps: float, affine: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim)) if affine else None

    def forward(self, x: Tensor) -> Tensor:
        return x if self.weight is None else (x * self.weight.to(at_least_float32(x.dtype))).to(x.dtype)


class LayerNorm(nn.LayerNorm):
    """torch's, with gradients of weight and bias in float32 or better."""

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


class BatchNorm(nn.BatchNorm1d):
    """torch's, computed in float32 or better: (N, D) -> (N, D).

    The running statistics stay in float32 when a model is converted to half precision, where they would not converge.
    The number of batches is a float32 too: fairseq's --store-ema averages all that a checkpoint contains.
    """

    def __init__(self, dim: int, **options: Any):
        super().__init__(dim, **options)
        self.num_batches_tracked = self.num_batches_tracked.float()

    def _apply(self, *args: Any, **kwargs: Any) -> nn.Module:
        exact = dict(self._buffers)
        super()._apply(*args, **kwargs)
        for name, buffer in exact.items():
            if self._buffers[name].dtype in (torch.float16, torch.bfloat16):
                self._buffers[name] = buffer.to(self._buffers[name].device, torch.float32)
        return self

    def forward(self, x: Tensor) -> Tensor:
        if self.training and x.size(0) == 1:
            raise ValueError("batch norm has a single position to compute its statistics from; give larger batches")
        wide = at_least_float32(x.dtype)
        weight, bias = (None if p is None else p.to(wide) for p in (self.weight, self.bias))
        statistics, momentum = (self.running_mean, self.running_var), self.momentum
        if self.training:
            self.num_batches_tracked.add_(1)
            if momentum is None:  # as torch.optim.swa_utils.update_bn sets it: the mean of all batches
                momentum = 1 / self.num_batches_tracked.item()
        return F.batch_norm(x.to(wide), *statistics, weight, bias, self.training, momentum or 0.0, self.eps).to(x.dtype)


class SyncBatchNorm(BatchNorm, nn.SyncBatchNorm):
    """torch's while several processes train, otherwise `BatchNorm`."""

    def forward(self, x: Tensor) -> Tensor:
        among_processes = torch.distributed.is_available() and torch.distributed.is_initialized()
        if not self.training or not among_processes or torch.distributed.get_world_size() == 1:
            return super().forward(x)
        if x.device.type == "cpu":
            raise ValueError("syncbatchnorm synchronises processes on GPUs only; choose batchnorm")
        return nn.SyncBatchNorm.forward(self, x)


class SequenceNorm(nn.Module):
    """One of NORMS over (B, L, D); batchnorm ignores pads in its statistics."""

    def __init__(self, kind: str, dim: int, eps: float = 1e-5, affine: bool = True):
        super().__init__()
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


NORMS = {
    "layernorm": lambda dim, eps, affine: LayerNorm(dim, eps=eps, elementwise_affine=affine),
    "scalenorm": lambda dim, eps, affine: RMSNorm(1, eps, affine),
    "rmsnorm": RMSNorm,
    "hf_rmsnorm": ElementwiseScale,
    "batchnorm": lambda dim, eps, affine: BatchNorm(dim, eps=eps, affine=affine),
    "syncbatchnorm": lambda dim, eps, affine: SyncBatchNorm(dim, eps=eps, affine=affine),
}
BATCH_NORMS = ("batchnorm", "syncbatchnorm")
