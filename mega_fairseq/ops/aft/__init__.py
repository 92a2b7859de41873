"""Attention without queries (Zhai et al. 2021, An Attention Free Transformer), with weights by distance.

    o_t = sum_u e^(a_tu) v_u / sum_u e^(a_tu),   a_tu = w_h(t - u) + k_u        for each channel, of head h

Tables w are (H, R) by t - u if causal, (H, 2 R - 1) otherwise; beyond the table w is 0. Causal rows may also see the
sums of older tokens, all with w = 0. Everything is in float32 or better.
"""

from typing import NamedTuple, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mega_fairseq.ops.aft.tiles import aft_tiles
from mega_fairseq.ops.padding import padding_from_lengths
from mega_fairseq.ops.precision import at_least_float32, without_autocast

PIECE = 512  # tokens that are summed together, since these fit into the cache of a CPU


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
        if counts is not None:
            k = k.masked_fill(padding_from_lengths(counts, k.size(1)).unsqueeze(-1), lowest)
        largest = torch.maximum(sums.largest, k.detach().amax(1).to(dtype))
        any_token = largest > lowest
        before = torch.exp(sums.largest - largest)
        numerator, denominator = sums.numerator * before, sums.denominator * before
        for start in range(0, k.size(1), PIECE):
            piece = slice(start, start + PIECE)
            e = torch.exp(k[:, piece].to(dtype) - largest.unsqueeze(1)) * any_token.unsqueeze(1)
            numerator, denominator = numerator + (e * v[:, piece].to(dtype)).sum(1), denominator + e.sum(1)
        return Sums(largest, numerator, denominator)


def as_token(sums: Sums) -> Tuple[Tensor, Tensor]:
    """The key and value of one token with the same effect, (B, D) each."""
    denominator = sums.denominator.clamp_min(torch.finfo(sums.denominator.dtype).tiny)
    return sums.largest + torch.log(denominator), sums.numerator / denominator


def of_channels(table: Tensor, dim: int) -> Tensor:
    """A table of heads by channels: (H, n) -> (n, D)."""
    return table.t().repeat_interleave(dim // table.size(0), 1)


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
    """`aft_naive` in tiles, with tensors of m x D entries; it keeps k, v, o and the denominators for backward."""
    keys, zero = k.size(1), 0 if causal else weight.size(1) // 2
    with without_autocast(k):
        weight = weight.to(at_least_float32(weight.dtype))
        if queries == 1 or keys == 1:
            w = F.pad(weight[:, zero : zero + keys], (0, max(0, keys - weight.size(1) + zero)))
            return aft_last_row(k, v, of_channels(w.flip(1), k.size(2)), older).unsqueeze(1)
        if padding is not None:
            k = k.to(weight.dtype).masked_fill(padding.unsqueeze(-1), torch.finfo(weight.dtype).min)
        out, log_denominators = aft_tiles(k, v, weight, causal)
        if queries is not None:
            out, log_denominators = (t[:, keys - queries :] for t in (out, log_denominators))
        if older is None:
            return out
        key, value = (t.unsqueeze(1) for t in as_token(older))
        return torch.lerp(out.to(value.dtype), value, torch.sigmoid(key - log_denominators)).to(out.dtype)
