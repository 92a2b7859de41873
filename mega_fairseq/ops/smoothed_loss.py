"""Label-smoothed cross entropy from features and the output matrix, without (T, V) scores in memory.

With q_v = epsilon' + (1 - epsilon - epsilon') [v is the target] and epsilon' = epsilon / (V - 1), as in fairseq:

    loss_t = -sum_v q_v log p_tv        p_t = softmax(W x_t + b)        dloss_t / dscore_tv = p_tv - q_v

All losses are summed, so their gradients are known as soon as the scores are: the fast form computes both in the
forward pass, for a few rows at a time.
"""

from typing import Any, List, NamedTuple, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mega_fairseq.ops.log_probs import rows_at_once
from mega_fairseq.ops.operators import operator
from mega_fairseq.ops.precision import at_least_float32, cast_dtype, product_dtype

# Gradients of scores in float16 are multiplied by this: softmax over 33,000 types is 3e-5, float16 is exact above 6e-5.
# Sums over the rows of a piece stay within its range.
HALF_SCALE = 32.0


class SmoothedLoss(NamedTuple):
    """Sums over all targets that are no pads, in float32 or better."""

    loss: Tensor
    nll_loss: Tensor  # -log p of the targets, without gradients
    correct: Tensor  # number of targets with the highest score


def smoothed_loss_naive(
    x: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    targets: Tensor,
    smoothing: float,
    pad: int,
    accuracy: bool = False,
) -> SmoothedLoss:
    """x (T, D), weight (V, D), bias (V,), targets (T,) -> losses. Without `accuracy`, none is counted as correct."""
    scores = F.linear(x, weight, bias)
    log_probs = F.log_softmax(scores.to(at_least_float32(scores.dtype)), -1)  # (T, V)
    real = targets != pad
    nll = -log_probs.gather(1, targets.unsqueeze(1)).squeeze(1)[real].sum()
    rest = smoothing / max(1, weight.size(0) - 1)
    loss = (1.0 - smoothing - rest) * nll - rest * log_probs[real].sum()
    correct = (log_probs.argmax(1).eq(targets) & real & accuracy).sum()
    return SmoothedLoss(loss, nll.detach(), correct)


def smoothed_loss(
    x: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    targets: Tensor,
    smoothing: float,
    pad: int,
    accuracy: bool = False,
) -> SmoothedLoss:
    """`smoothed_loss_naive` in pieces of rows; gradients of weight and bias are summed in float32 or better."""
    x = x.to(product_dtype(x, cast_dtype(x)))
    losses = _pieces(x, weight, bias, targets, smoothing, pad, accuracy, torch.is_grad_enabled())[:3]
    return SmoothedLoss(losses[0], losses[1].detach(), losses[2])


def _forward(
    x: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    targets: Tensor,
    smoothing: float,
    pad: int,
    accuracy: bool,
    gradients: bool,
) -> Tuple[Tensor, ...]:
    """The losses, then the gradients of x, weight and bias for a gradient of 1."""
    types, wide = weight.size(0), at_least_float32(x.dtype)
    rest = smoothing / max(1, types - 1)
    scale = HALF_SCALE if x.dtype == torch.float16 else 1.0
    w, b = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    sums, correct = x.new_zeros(2, dtype=wide), targets.new_zeros(())  # of nll and of all log-probabilities
    dx = x.new_empty(x.shape if gradients else 0, dtype=wide)
    dw = torch.zeros(weight.shape if gradients else 0, dtype=wide, device=x.device)
    db = torch.zeros(types if gradients and bias is not None else 0, dtype=wide, device=x.device)
    rows = rows_at_once(x, types)
    for start in range(0, x.size(0), rows):
        piece = slice(start, start + rows)
        target = targets[piece].unsqueeze(1)  # (n, 1)
        real = target.ne(pad).to(wide)
        scores = F.linear(x[piece], w, b)
        if accuracy:
            correct += (scores.argmax(1, keepdim=True).eq(target) & target.ne(pad)).sum()
        log_probs = F.log_softmax(scores, -1, dtype=wide)  # (n, V)
        sums[0] -= (log_probs.gather(1, target) * real).sum()
        if smoothing:
            sums[1] += (log_probs.sum(1, keepdim=True) * real).sum()
        if not gradients:
            continue
        dscores = log_probs.exp_()
        if smoothing:
            dscores.sub_(rest)
        dscores.scatter_add_(1, target, torch.full_like(real, smoothing + rest - 1.0))
        dscores = dscores.mul_(scale).to(x.dtype) if scale != 1.0 else dscores.to(x.dtype)
        # Pads: rows of zeros in one factor, since dscores is the larger one.
        dx[piece] = torch.mm(dscores, w).to(wide).mul_(real)
        of_real = x[piece] * real.to(x.dtype)
        if x.dtype == wide:
            dw.addmm_(dscores.t(), of_real)
        else:
            dw += torch.mm(dscores.t(), of_real)
        if bias is not None:
            db += torch.mv(dscores.t(), real.squeeze(1).to(x.dtype))
    loss = (1.0 - smoothing - rest) * sums[0] - rest * sums[1]
    gradient = [t if scale == 1.0 else t.div_(scale) for t in (dx, dw, db)]
    return (loss, sums[0].clone(), correct, *gradient)


def _fake(x: Tensor, weight: Tensor, bias: Optional[Tensor], targets: Tensor, *options: Any) -> Tuple[Tensor, ...]:
    wide, gradients = at_least_float32(x.dtype), options[-1]
    shapes = (x.shape, weight.shape, weight.shape[:1] if bias is not None else 0) if gradients else (0, 0, 0)
    return (
        *(x.new_empty((), dtype=wide) for _ in range(2)),
        targets.new_empty(()),
        *(x.new_empty(s, dtype=wide) for s in shapes),
    )


def _backward(grads: Sequence[Optional[Tensor]], saved: List[Tensor], *args: Any) -> List[Tensor]:
    return [(g * grads[0]).to(t.dtype) for g, t in zip(saved, args[:3]) if t is not None]


_pieces = operator(
    "smoothed_loss(Tensor x, Tensor weight, Tensor? bias, Tensor targets, float smoothing, int pad, bool accuracy, "
    "bool gradients) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _forward,
    _fake,
    _backward,
    saved=slice(3, None),
)
