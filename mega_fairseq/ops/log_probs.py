"""The log-probability of each target alone: what a loss and a perplexity ask for, where T x V scores would not fit."""

from typing import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mega_fairseq.ops.precision import at_least_float32

SLICE = 2**22  # scores held at once: 16 MB in float32, enough rows for a matrix product at full speed

Scores = Callable[[Tensor], Tensor]  # features (T, D) -> scores (T, V)


def naive_target_log_probs(scores: Scores, x: Tensor, targets: Tensor) -> Tensor:
    """log softmax(scores(x)) at the targets: x (T, D), targets (T,) -> (T,)."""
    logits = scores(x)
    log_probs = F.log_softmax(logits.to(at_least_float32(logits.dtype)), dim=-1)  # (T, V)
    return log_probs.gather(1, targets.unsqueeze(1)).squeeze(1)


def target_log_probs(scores: Scores, x: Tensor, targets: Tensor, types: int, size: int = SLICE) -> Tensor:
    """The same from slices of rows with about `size` scores each.

    Where a gradient is recorded, a slice's scores are computed once more on the way back in place of being kept.
    """
    rows = max(1, size // types)
    slices = list(zip(x.split(rows), targets.split(rows)))
    if len(slices) == 1:
        return _log_probs(scores, x, targets)
    if torch.is_grad_enabled():
        pieces = [checkpoint(_log_probs, scores, *piece, use_reentrant=False) for piece in slices]
    else:
        pieces = [_log_probs(scores, *piece) for piece in slices]
    return torch.cat(pieces)


def _log_probs(scores: Scores, x: Tensor, targets: Tensor) -> Tensor:
    logits = scores(x)
    return -F.cross_entropy(logits.to(at_least_float32(logits.dtype)), targets, reduction="none")
