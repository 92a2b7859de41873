"""Attention without queries (Zhai et al. 2021, An Attention Free Transformer), with weights by distance.

    o_t = sum_u e^(a_tu) v_u / sum_u e^(a_tu),   a_tu = w_h(t - u) + k_u        for each channel, of head h

Tables w are (H, R) by t - u if causal, (H, 2 R - 1) otherwise; beyond the table w is 0. Causal rows may also see the
sums of older tokens, all with w = 0. Everything is in float32 or better.
"""

from typing import NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from mega_fairseq.ops.aft.slabs import SLAB, in_slabs
from mega_fairseq.ops.aft.tiles import log_weights
from mega_fairseq.ops.derivatives import once_differentiable
from mega_fairseq.ops.padding import padding_from_lengths
from mega_fairseq.ops.precision import at_least_float32, is_compiling, without_autocast


class Sums(NamedTuple):
    """The sums over tokens of the past, each (B, D) in float32 or better; without any, `no_sums`."""

    largest: Tensor  # key
    numerator: Tensor  # sum of e^(k_u - largest) v_u
    denominator: Tensor  # sum of e^(k_u - largest)


def no_sums(k: Tensor) -> Sums:
    zero = k.new_zeros(k.size(0), k.size(2), dtype=at_least_float32(k.dtype))
    return Sums(torch.full_like(zero, torch.finfo(zero.dtype).min), zero, zero.clone())


def with_tokens(sums: Sums, k: Tensor, v: Tensor, counts: Optional[Tensor] = None) -> Sums:
    """The sums with the first `counts` (B,) of these tokens, by default all: k, v (B, n, D).

    Keys of the lowest number of their dtype do not count.
    """
    if k.size(1) == 0:
        return sums
    with without_autocast(k):
        dtype, lowest = sums.largest.dtype, torch.finfo(k.dtype).min
        padding = None if counts is None else padding_from_lengths(counts, k.size(1)).unsqueeze(-1)
        real = k.detach() if padding is None else k.detach().masked_fill(padding, lowest)
        largest = torch.maximum(sums.largest, real.amax(1).to(dtype))
        any_token = largest > lowest
        before = torch.exp(sums.largest - largest)
        apply = _added if is_compiling() else _Added.apply
        numerator, denominator = apply(k, v, largest, padding)
        return Sums(
            largest,
            torch.addcmul(numerator * any_token, sums.numerator, before),
            torch.addcmul(denominator * any_token, sums.denominator, before),
        )


def as_token(sums: Sums) -> Tuple[Tensor, Tensor]:
    """The key and value of one token with the same effect, (B, D) each."""
    denominator = sums.denominator.clamp_min(torch.finfo(sums.denominator.dtype).tiny)
    return sums.largest + torch.log(denominator), sums.numerator / denominator


def _shares(k: Tensor, largest: Tensor, padding: Optional[Tensor]) -> Tensor:
    e = torch.exp(k.to(largest.dtype) - largest.unsqueeze(1))
    return e if padding is None else e.masked_fill(padding, 0.0)


def _added(k: Tensor, v: Tensor, largest: Tensor, padding: Optional[Tensor]) -> Tuple[Tensor, Tensor]:
    e = _shares(k, largest, padding)
    return (e * v.to(e.dtype)).sum(1), e.sum(1)


class _Added(torch.autograd.Function):
    """`_added` of pieces that fit into the processor's cache; it saves nothing but its inputs for backward."""

    @staticmethod
    def forward(ctx, k, v, largest, padding):
        ctx.save_for_backward(k, v, largest, padding)
        size = max(1, SLAB // (k.size(0) * k.size(2))) if k.device.type == "cpu" else k.size(1)
        total = [torch.zeros_like(largest), torch.zeros_like(largest)]
        for start in range(0, k.size(1), size):
            piece = slice(start, start + size)
            of_piece = _added(k[:, piece], v[:, piece], largest, None if padding is None else padding[:, piece])
            total = [a + b for a, b in zip(total, of_piece)]
        return tuple(total)

    @staticmethod
    @once_differentiable
    def backward(ctx, dnumerator, ddenominator):
        k, v, largest, padding = ctx.saved_tensors
        with without_autocast(k):
            e = _shares(k, largest, padding)
            dv = e * dnumerator.unsqueeze(1)
            dk = torch.addcmul(e * ddenominator.unsqueeze(1), dv, v.to(dv.dtype))
        return dk.to(k.dtype), dv.to(v.dtype), None, None


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
        if older is not None:
            key, value = as_token(older)
            a = torch.cat([key[:, None, None].expand(-1, a.size(1), -1, -1), a], 2)
            v = torch.cat([value.unsqueeze(1), v], 1)
        return (torch.softmax(a, 2) * v.unsqueeze(1)).sum(2).to(dtype)


def aft_last_row(k: Tensor, v: Tensor, weight: Tensor, older: Optional[Sums] = None) -> Tensor:
    """The last row of causal AFT alone: k, v (B, m, D), weights (m, D) of these keys -> (B, D) in v's dtype."""
    dtype = v.dtype
    k, v, weight = (t.to(at_least_float32(t.dtype)) for t in (k, v, weight))
    a = k + weight
    if older is not None:
        key, value = as_token(older)
        a, v = torch.cat([key.unsqueeze(1), a], 1), torch.cat([value.unsqueeze(1), v], 1)
    return (torch.softmax(a, 1) * v).sum(1).to(dtype)


def aft(
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    causal: bool = True,
    queries: Optional[int] = None,
    padding: Optional[Tensor] = None,
    older: Optional[Sums] = None,
) -> Tensor:
    """`aft_naive` in tiles, with tensors of m x D entries; of these it keeps k, v, o and the denominators for backward.

    On the CPU, results that this loses to rounding are computed again. On GPUs, where looking at them costs time, and
    in compiled models they are NaN: rows after a very large key, if the table falls by more than 80 within 64 places.
    At the start of training, tables fall by at most 1 per place.
    """
    queries = queries or k.size(1)
    with without_autocast(k):
        if queries == 1:
            w = log_weights(weight, causal, 0, k.size(1)).flip(1).repeat_interleave(k.size(2) // weight.size(0), 0)
            return aft_last_row(k, v, w.t(), older).unsqueeze(1)
        if padding is not None:
            k = k.masked_fill(padding.unsqueeze(-1), torch.finfo(k.dtype).min)
        weight = weight.to(at_least_float32(weight.dtype))
        return in_slabs(k, v, weight, *(older or (None, None, None)), causal, queries)
