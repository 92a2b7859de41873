"""Sparse attention (Child et al. 2019): a query sees a set of about sqrt(n) places instead of all n.

With stride l, summary width c, and places i of a query and j of a key in their window (j <= i if causal):

              first set                  second set
    strided   |i - j| <= l               (i - j) mod l = 0
    fixed     floor(i / l) = floor(j / l)  j mod l in l - c (v + 1) .. l - c v - 1, the summary of j's block

A head attends to the first set, to the second, or to their union under one softmax; a query that sees no key gives 0.
With s `subblocks`, v is the head's number modulo s, so that heads read different summaries; otherwise v = 0.
"""

from typing import NamedTuple, Optional

import torch
from torch import Tensor

from mega_fairseq.ops.attention_scores import MASKED
from mega_fairseq.ops.dropout import keep_mask
from mega_fairseq.ops.precision import at_least_float32, without_autocast

PATTERNS = ("strided", "fixed")
SETS = ("first", "second", "merged", "heads")  # heads: even heads the first set, odd heads the second


class Sparsity(NamedTuple):
    """Which places a query sees."""

    pattern: str
    sets: str
    stride: int
    causal: bool = True
    summary: int = 0
    subblocks: int = 1


def visible_places(sparsity: Sparsity, heads: int, size: int, device: Optional[torch.device] = None) -> Tensor:
    """The sets by their definition: (H, n, n) bool, True = query i sees key j."""
    i, j = torch.arange(size, device=device).unsqueeze(1), torch.arange(size, device=device)
    return torch.stack([_places_of_head(sparsity, head, i, j).expand(size, size) for head in range(heads)])


def _places_of_head(sparsity: Sparsity, head: int, i: Tensor, j: Tensor) -> Tensor:
    pattern, sets, stride, causal, summary, subblocks = sparsity
    if sets == "heads":
        sets, head = ("first", "second")[head % 2], head // 2
    if pattern == "strided":
        first, second = (i - j).abs() <= stride, (i - j) % stride == 0
    else:
        v = head % subblocks
        first = i // stride == j // stride
        second = (j % stride >= stride - summary * (v + 1)) & (j % stride < stride - summary * v)
    seen = {"first": first, "second": second, "merged": first | second}[sets]
    return seen & (j <= i) if causal else seen


def sparse_attention_naive(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sparsity: Sparsity,
    key_padding: Optional[Tensor] = None,
    keep: Optional[Tensor] = None,
    scale: float = 1.0,
) -> Tensor:
    """Sparse attention with whole matrices: q (G, n, H, z) for the last n of m places, k and v (G, m, H, z).

    `key_padding` (G, m) bool, True = pad; `keep` (G, H, n, m) and `scale` are for dropout.
    """
    dtype = at_least_float32(q.dtype)
    with without_autocast(q):
        (queries, heads, width), keys = q.shape[1:], k.size(1)
        hidden = ~visible_places(sparsity, heads, keys, q.device)[:, keys - queries :]  # (H, n, m)
        if key_padding is not None:
            hidden = hidden | key_padding[:, None, None]
        scores = torch.einsum("gihz,gjhz->ghij", q.to(dtype) * width**-0.5, k.to(dtype))
        weights = torch.softmax(scores.masked_fill(hidden, MASKED), -1).masked_fill(hidden, 0.0)
        if keep is not None:
            weights = weights * keep * scale
        return torch.einsum("ghij,gjhz->gihz", weights, v.to(dtype)).to(v.dtype)


def sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, sparsity: Sparsity, key_padding: Optional[Tensor] = None, dropout: float = 0.0
) -> Tensor:
    """Attention of q (G, n, H, z) at the last n of m places to k and v (G, m, H, z) -> (G, n, H, z)."""
    keep, scale = keep_mask((q.size(0), q.size(2), q.size(1), k.size(1)), dropout, q.device)
    return sparse_attention_naive(q, k, v, sparsity, key_padding, keep, scale)
