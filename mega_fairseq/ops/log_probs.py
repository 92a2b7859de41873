"""The log-probability of each target alone: what a loss and a perplexity ask for, where T x V scores would not fit.

A vocabulary is given as its weights, one row a type, in one table or several that follow each other.
"""

from functools import partial
from typing import Iterator, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mega_fairseq.ops.linear import ready_linear
from mega_fairseq.ops.precision import at_least_float32, autocast_dtype

# Scores in memory at once. On a CPU, 16 MB of them are enough for products at full speed and few enough to be reused
# by the allocator; a GPU wants larger products.
SCORES, SCORES_GPU = 2**22, 2**26
TYPES = 2**15  # types looked at together: their weights stay in the cache while all tokens pass
LAID_OUT_FROM = 256  # tokens from which on laying weights out for the CPU's products pays


def naive_target_log_probs(x: Tensor, weights: Sequence[Tensor], targets: Tensor) -> Tensor:
    """log softmax(x W^T) at the targets: x (T, D), weights (V, D) together, targets (T,) -> (T,)."""
    logits = F.linear(x, torch.cat(list(weights)))
    log_probs = F.log_softmax(logits.to(at_least_float32(logits.dtype)), dim=-1)  # (T, V)
    return log_probs.gather(1, targets.unsqueeze(1)).squeeze(1)


def target_log_probs(x: Tensor, weights: Sequence[Tensor], targets: Tensor) -> Tensor:
    """The same in float32 or better, with some rows' scores in memory at a time, or some types' of some rows."""
    return (_by_rows if torch.is_grad_enabled() else _by_types)(x, weights, targets)


def _by_rows(x: Tensor, weights: Sequence[Tensor], targets: Tensor) -> Tensor:
    """With a gradient to record: a slice's scores are computed once more on the way back in place of being kept."""
    rows = max(1, _scores_at_once(x) // sum(weight.size(0) for weight in weights))
    if x.size(0) <= rows:
        return _log_probs(x, targets, *weights)
    slices = zip(x.split(rows), targets.split(rows))
    again = partial(checkpoint, _log_probs, use_reentrant=False, preserve_rng_state=False)  # nothing in it is random
    return torch.cat([again(*piece, *weights) for piece in slices])


def _log_probs(x: Tensor, targets: Tensor, *weights: Tensor) -> Tensor:
    logits = torch.cat([F.linear(x, weight) for weight in weights], 1) if len(weights) > 1 else F.linear(x, weights[0])
    return -F.cross_entropy(logits.to(at_least_float32(logits.dtype)), targets, reduction="none")


def _by_types(x: Tensor, weights: Sequence[Tensor], targets: Tensor) -> Tensor:
    """Without a gradient: log-sum-exp over one block of types after the other, so that no vocabulary is too large."""
    dtype = at_least_float32(x.dtype)
    total = x.new_full((x.size(0),), -torch.inf, dtype=dtype)
    score = torch.zeros_like(total)  # of the target
    plain = x.size(0) < LAID_OUT_FROM or x.dtype != weights[0].dtype or autocast_dtype(x.device.type) is not None
    for first, block in _blocks(weights):
        product = partial(F.linear, weight=block) if plain else ready_linear(block)
        step = max(1, _scores_at_once(x) // block.size(0))
        for start in range(0, x.size(0), step):
            rows = slice(start, start + step)
            logits = product(x[rows]).to(dtype)  # (rows, types)
            local = targets[rows] - first
            here = (local >= 0) & (local < block.size(0))
            local = local.clamp(0, block.size(0) - 1)
            at = logits.gather(1, local.unsqueeze(1)).squeeze(1)
            # torch's cross entropy is log-sum-exp in one pass over the scores, less one of them
            log_sum = at + F.cross_entropy(logits, local, reduction="none")
            total[rows] = torch.logaddexp(total[rows], log_sum)
            score[rows] = torch.where(here, at, score[rows])
    return score - total


def _blocks(weights: Sequence[Tensor]) -> Iterator[Tuple[int, Tensor]]:
    """Tables in blocks of about equal size, each with the number of its first type."""
    first = 0
    for weight in weights:
        for block in weight.chunk(-(-weight.size(0) // TYPES)):
            yield first, block
            first += block.size(0)


def _scores_at_once(x: Tensor) -> int:
    return SCORES if x.device.type == "cpu" else SCORES_GPU
