"""The log-probability of each target, for losses and perplexities, without T x V scores in memory.

A vocabulary is given by its weights, one row per type, in one table or in several consecutive ones.
"""

from functools import partial
from typing import Optional, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mega_fairseq.ops.backend import on_cpu
from mega_fairseq.ops.precision import at_least_float32

# Scores in memory at once. On a CPU, 32 MB are enough for products at full speed; a GPU needs larger ones.
SCORES, SCORES_GPU = 2**23, 2**26


def rows_at_once(x: Tensor, types: int) -> int:
    """How many rows of scores of all types may be in memory, on the device of x."""
    return max(1, (SCORES if on_cpu(x) else SCORES_GPU) // types)


def target_log_probs_naive(
    x: Tensor, weights: Sequence[Tensor], targets: Tensor, bias: Optional[Tensor] = None
) -> Tensor:
    """log softmax(x W^T + b) at the targets: x (T, D), weights (V, D) together, targets (T,), b (V,) -> (T,)."""
    logits = F.linear(x, torch.cat(list(weights)), bias)
    log_probs = F.log_softmax(logits.to(at_least_float32(logits.dtype)), dim=-1)  # (T, V)
    return log_probs.gather(1, targets.unsqueeze(1)).squeeze(1)


def target_log_probs(x: Tensor, weights: Sequence[Tensor], targets: Tensor, bias: Optional[Tensor] = None) -> Tensor:
    """The same in float32 or better, with the scores of some rows in memory, which backward computes again."""
    rows = rows_at_once(x, sum(weight.size(0) for weight in weights))
    if x.size(0) <= rows:
        return _log_probs(x, targets, bias, *weights)
    slices = zip(x.split(rows), targets.split(rows))
    run = partial(checkpoint, _log_probs, use_reentrant=False, preserve_rng_state=False)  # nothing in it is random
    return torch.cat([run(*piece, bias, *weights) for piece in slices])


def _log_probs(x: Tensor, targets: Tensor, bias: Optional[Tensor], *weights: Tensor) -> Tensor:
    if len(weights) == 1:
        logits = F.linear(x, weights[0], bias)
    else:
        logits = torch.cat([F.linear(x, weight) for weight in weights], 1)
        logits = logits if bias is None else logits + bias
    return -F.cross_entropy(logits.to(at_least_float32(logits.dtype)), targets, reduction="none")
