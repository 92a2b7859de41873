"""The log-probability of each target, for losses and perplexities, without T x V scores in memory.

A vocabulary is given by its weights, one row per type, in one table or in several consecutive ones.
"""

from functools import partial
from typing import Iterator, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mega_fairseq.ops.backend import on_cpu
from mega_fairseq.ops.linear import ready_linear
from mega_fairseq.ops.operators import is_plain
from mega_fairseq.ops.precision import at_least_float32, autocast_dtype

# Scores in memory at once. On a CPU, 16 MB are enough for products at full speed and small enough for the allocator to
# reuse; a GPU needs larger products.
SCORES, SCORES_GPU = 2**22, 2**26
TYPES = 2**15  # types in a block: its weights stay in the cache while all tokens are processed
PACK_FROM = 256  # number of tokens from which packing weights for the CPU pays off


def target_log_probs_naive(
    x: Tensor, weights: Sequence[Tensor], targets: Tensor, bias: Optional[Tensor] = None
) -> Tensor:
    """log softmax(x W^T + b) at the targets: x (T, D), weights (V, D) together, targets (T,), b (V,) -> (T,)."""
    logits = F.linear(x, torch.cat(list(weights)), bias)
    log_probs = F.log_softmax(logits.to(at_least_float32(logits.dtype)), dim=-1)  # (T, V)
    return log_probs.gather(1, targets.unsqueeze(1)).squeeze(1)


def target_log_probs(x: Tensor, weights: Sequence[Tensor], targets: Tensor, bias: Optional[Tensor] = None) -> Tensor:
    """The same in float32 or better, with only the scores of some rows or some types in memory at once."""
    in_rows = torch.is_grad_enabled() or not all(map(is_plain, weights))
    return (_by_rows if in_rows else _by_types)(x, weights, targets, bias)


def _by_rows(x: Tensor, weights: Sequence[Tensor], targets: Tensor, bias: Optional[Tensor]) -> Tensor:
    """With gradients: the scores of a slice are recomputed in backward instead of being kept.

    Also for weights that only take whole products, such as quantised ones.
    """
    rows = max(1, _scores_at_once(x) // sum(weight.size(0) for weight in weights))
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


def _by_types(x: Tensor, weights: Sequence[Tensor], targets: Tensor, bias: Optional[Tensor]) -> Tensor:
    """Without gradients: log-sum-exp over blocks of types, for vocabularies of any size."""
    dtype = at_least_float32(x.dtype)
    total = x.new_full((x.size(0),), -torch.inf, dtype=dtype)
    score = torch.zeros_like(total)  # of the target
    plain = x.size(0) < PACK_FROM or x.dtype != weights[0].dtype or autocast_dtype(x) is not None
    for first, block in _blocks(weights):
        of_block = None if bias is None else bias[first : first + block.size(0)]
        product = partial(F.linear, weight=block, bias=of_block) if plain else ready_linear(block, of_block)
        step = max(1, _scores_at_once(x) // block.size(0))
        for start in range(0, x.size(0), step):
            rows = slice(start, start + step)
            logits = product(x[rows]).to(dtype)  # (rows, types)
            local = targets[rows] - first
            in_block = (local >= 0) & (local < block.size(0))
            local = local.clamp(0, block.size(0) - 1)
            own = logits.gather(1, local.unsqueeze(1)).squeeze(1)
            # torch's cross entropy is log-sum-exp minus the target's score, in one pass over the scores
            log_sum = own + F.cross_entropy(logits, local, reduction="none")
            total[rows] = torch.logaddexp(total[rows], log_sum)
            score[rows] = torch.where(in_block, own, score[rows])
    return score - total


def _blocks(weights: Sequence[Tensor]) -> Iterator[Tuple[int, Tensor]]:
    """Tables in blocks of about equal size, with the index of each block's first type."""
    first = 0
    for weight in weights:
        for block in weight.chunk(-(-weight.size(0) // TYPES)):
            yield first, block
            first += block.size(0)


def _scores_at_once(x: Tensor) -> int:
    return SCORES if on_cpu(x) else SCORES_GPU
