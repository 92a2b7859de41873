"""The sums over tokens of AFT's past."""

from typing import NamedTuple, Optional, Tuple

import torch
from torch import Tensor

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
