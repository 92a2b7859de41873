"""Attention of single tokens to keys and values in fixed storage, by the usual attention at one position."""

from typing import Optional, Tuple

from torch import Tensor

from mega_fairseq.ops.attention.fixed.storage import FixedKeyValues, FixedPlace
from mega_fairseq.ops.attention.one_position import weights_at_one_position
from mega_fairseq.ops.attention.scores import weighted_sum


def attend_in_storage_naive(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    place: FixedPlace,
    bias: Optional[Tensor],
    function: str,
    outer: bool = False,
    new: Optional[Tuple[Tensor, Tensor]] = None,
    padding: Optional[Tensor] = None,
) -> Tensor:
    """q (R, z) at `place` -> (R, e), with a bias for the distances from 1 - place.limit on.

    With `new`, a key (R, z) and a value (R, e), these are stored at `place`, and queries see the keys up to there.
    Otherwise R / S queries each share keys (S, m, z) and values (S, m, e), without those of `padding` (S, m).
    """
    if new is not None:
        cache = FixedKeyValues(keys, values, place).append(*(t.unsqueeze(1) for t in new), None)
        keys, values, padding = cache.keys, cache.values, cache.padding
    queries = q.reshape(keys.size(0), -1, q.size(-1))
    bias = None if bias is None else place.bias(bias, keys.size(1))
    weights = weights_at_one_position(queries, keys, function, bias, padding, outer=outer)
    return weighted_sum(weights, values).flatten(0, 1)
