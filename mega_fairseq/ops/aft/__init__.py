"""Attention without queries (Zhai et al. 2021, An Attention Free Transformer), with weights by distance.

    o_t = sum_u e^(a_tu) v_u / sum_u e^(a_tu),   a_tu = w_h(t - u) + k_u        for each channel, of head h

Tables w are (H, R) by t - u if causal, (H, 2 R - 1) otherwise; beyond the table w is 0. Causal rows may also see the
sums of older tokens, all with w = 0. Everything is in float32 or better.

    naive.py    the definition
    tiles.py    matrix products of tiles, on any device
    sums.py     the sums over older tokens
"""

from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from mega_fairseq.ops.aft.naive import aft_naive, of_channels
from mega_fairseq.ops.aft.sums import Sums, as_token
from mega_fairseq.ops.aft.tiles import aft_tiles
from mega_fairseq.ops.backend import Forms
from mega_fairseq.ops.precision import at_least_float32, without_autocast


def aft_last_row(k: Tensor, v: Tensor, weight: Tensor, older: Optional[Sums] = None) -> Tensor:
    """The last row of causal AFT alone: k, v (B, m, D), weights (m, D) of these keys -> (B, D) in v's dtype."""
    dtype = v.dtype
    k, v, weight = (t.to(at_least_float32(t.dtype)) for t in (k, v, weight))
    a = k + weight
    if older is not None:
        key, value = as_token(older)
        a, v = torch.cat([key.unsqueeze(1), a], 1), torch.cat([value.unsqueeze(1), v], 1)
    return (torch.softmax(a, 1) * v).sum(1).to(dtype)


def _in_tiles(
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    causal: bool = True,
    queries: Optional[int] = None,
    padding: Optional[Tensor] = None,
    older: Optional[Sums] = None,
) -> Tensor:
    """With tensors of m x D entries; it keeps k, v, o and the denominators for backward."""
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


aft = Forms(aft_naive, _in_tiles)
