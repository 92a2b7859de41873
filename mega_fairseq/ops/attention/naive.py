"""The definition of attention, with whole matrices and autograd."""

from typing import Optional

import torch
from torch import Tensor

from mega_fairseq.ops.attention.scores import weigh
from mega_fairseq.ops.precision import at_least_float32


def attention_weights(
    q: Tensor,
    k: Tensor,
    function: str = "softmax",
    causal: bool = False,
    bias: Optional[Tensor] = None,
    key_padding: Optional[Tensor] = None,
    multiplier: Optional[Tensor] = None,
    outer: bool = False,
    scale: Optional[float] = None,
) -> Tensor:
    """The weights of `attention` before dropout, (G, n, m), in float32 or better: it returns their `weighted_sum`."""
    (_, queries, width), keys = q.shape, k.size(1)
    scale = width**-0.5 if scale is None else scale
    scores = torch.bmm(q * scale, k.transpose(1, 2)).to(at_least_float32(q.dtype))
    rows, columns = (torch.arange(size, device=q.device) for size in (queries, keys))
    index = columns - rows.unsqueeze(1) + queries - 1  # (n, m)
    bias, multiplier = (None if t is None else t[..., index] for t in (bias, multiplier))
    visible = visible_keys(q, k, causal, key_padding)
    return weigh(scores, function, None if visible is None else ~visible, bias, multiplier, outer, scale)


def visible_keys(q: Tensor, k: Tensor, causal: bool, key_padding: Optional[Tensor]) -> Optional[Tensor]:
    """The keys that each query may see: (n, m), (G, 1, m) or (G, n, m) bool, or None for all."""
    queries, keys = q.size(1), k.size(1)
    visible = None
    if causal:
        visible = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
    if key_padding is not None:
        real = ~key_padding.unsqueeze(1)
        visible = real if visible is None else visible & real
    return visible
