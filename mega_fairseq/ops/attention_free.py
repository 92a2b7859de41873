"""Attention without queries (Zhai et al. 2021, An Attention Free Transformer), with weights by distance.

    o_t = sum_u e^(a_tu) v_u / sum_u e^(a_tu),   a_tu = w_h(t - u) + k_u        for each channel, of head h

Tables w are (H, R) by t - u if causal, (H, 2 R - 1) otherwise; beyond the table w is 0. Causal rows may also see the
sums of older tokens, all with w = 0. Everything is in float32 or better.
"""

from typing import NamedTuple, Optional

import torch
from torch import Tensor

from mega_fairseq.ops.padding import padding_from_lengths
from mega_fairseq.ops.precision import at_least_float32, without_autocast


class Sums(NamedTuple):
    """The sums over tokens of the past, each (B, D) in float32 or better; without any, `no_sums`."""

    largest: Tensor  # key
    numerator: Tensor  # sum of e^(k_u - largest) v_u
    denominator: Tensor  # sum of e^(k_u - largest)


def no_sums(k: Tensor) -> Sums:
    zero = k.new_zeros(k.size(0), k.size(2), dtype=at_least_float32(k.dtype))
    return Sums(torch.full_like(zero, torch.finfo(zero.dtype).min), zero, zero)


def with_tokens(sums: Sums, k: Tensor, v: Tensor, counts: Optional[Tensor] = None) -> Sums:
    """The sums with the first `counts` (B,) of these tokens, by default all: k, v (B, n, D).

    Keys of the lowest number of their dtype do not count.
    """
    if k.size(1) == 0:
        return sums
    with without_autocast(k):
        dtype = sums.largest.dtype
        unseen = k <= torch.finfo(k.dtype).min
        if counts is not None:
            unseen = unseen | padding_from_lengths(counts, k.size(1)).unsqueeze(-1)
        k = k.to(dtype).masked_fill(unseen, torch.finfo(dtype).min)
        largest = torch.maximum(sums.largest, k.detach().amax(1))
        before = torch.exp(sums.largest - largest)
        e = torch.exp(k - largest.unsqueeze(1)).masked_fill(unseen, 0.0)
        return Sums(
            largest,
            torch.addcmul((e * v.to(dtype)).sum(1), sums.numerator, before),
            torch.addcmul(e.sum(1), sums.denominator, before),
        )


def aft_naive(
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    causal: bool = True,
    queries: Optional[int] = None,
    padding: Optional[Tensor] = None,
    older: Optional[Sums] = None,
) -> Tensor:
    """The definition: k, v (B, m, D) -> the last `queries` rows of o (B, n, D), by a tensor of n x m x D entries."""
    batch, keys, dim = k.shape
    dtype, lowest = v.dtype, torch.finfo(at_least_float32(k.dtype)).min
    with without_autocast(k):
        k, v, weight = (t.to(at_least_float32(t.dtype)) for t in (k, v, weight))
        rows = torch.arange(keys - (queries or keys), keys, device=k.device)
        distance = rows.unsqueeze(1) - torch.arange(keys, device=k.device)  # (n, m)
        first = 0 if causal else weight.size(1) // 2  # the index of distance 0
        within = (distance + first >= 0) & (distance + first < weight.size(1))
        w = weight[:, (distance + first).clamp(0, weight.size(1) - 1)].masked_fill(~within, 0.0)  # (H, n, m)
        w = w.repeat_interleave(dim // weight.size(0), 0).permute(1, 2, 0)  # (n, m, D)
        a = k.unsqueeze(1) + w
        if causal:
            a = a.masked_fill((distance < 0).unsqueeze(-1), lowest)
        if padding is not None:
            a = a.masked_fill(padding[:, None, :, None], lowest)
        if older is not None:  # like one more token
            key = older.largest + torch.log(older.denominator.clamp_min(torch.finfo(older.largest.dtype).tiny))
            value = older.numerator / older.denominator.clamp_min(torch.finfo(older.largest.dtype).tiny)
            a = torch.cat([key[:, None, None].expand(-1, a.size(1), -1, -1), a], 2)
            v = torch.cat([value.unsqueeze(1), v], 1)
        return (torch.softmax(a, 2) * v.unsqueeze(1)).sum(2).to(dtype)


def aft(
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    causal: bool = True,
    queries: Optional[int] = None,
    padding: Optional[Tensor] = None,
    older: Optional[Sums] = None,
) -> Tensor:
    """`aft_naive`."""
    return aft_naive(k, v, weight, causal, queries, padding, older)
