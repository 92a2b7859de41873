"""Relative position biases b_rel of eq. 11, one class each: scores for a range of distances; attention with them.

A bias returns one score for each of the distances (key minus query position) first .. stop - 1. It may also rotate
queries and keys.
"""

from typing import Any, Callable, Dict, List, Optional, Tuple, Type, Union

import torch
from torch import Tensor, nn

from mega_fairseq.modules.config import ModuleConfig
from mega_fairseq.ops.attention import position as ops
from mega_fairseq.ops.attention import weighted_sum
from mega_fairseq.ops.attention.chunks import KeyValues
from mega_fairseq.ops.attention.fixed import FixedKeyValues, FixedPlace, attend_in_storage
from mega_fairseq.ops.attention.one_position import weights_at_one_position
from mega_fairseq.ops.attention.position import cos_sin, rotary_distances, rotate, turned
from mega_fairseq.ops.precision import at_least_float32


class PositionBias(nn.Module):
    """The base class of position biases; it adds no bias itself. `dim` is the width z of queries and keys."""

    longest: Optional[int] = None  # the longest sequence that it covers; None for any length

    def __init__(self, dim: int, max_positions: int, causal: bool):
        super().__init__()

    def forward(self, first: int, stop: int, device: torch.device) -> Optional[Tensor]:
        """Scores for distances first .. stop - 1: (stop - first,), or None for no bias."""
        return None

    def rotate(self, x: Tensor, positions: Union[int, Tensor]) -> Tensor:
        """Queries or keys (B, n, z) at positions (n,) or (B, n), or from a first one, rotated by biases that do so."""
        return x

    def positioned(self, q: Tensor, k: Tensor, first_query: int) -> Tuple[Tensor, Tensor, Optional[Tensor]]:
        """Queries at first_query, ... and keys at 0, ..., rotated by biases that do so; and b_rel as in `attention`."""
        bias = self(1 - q.size(1) - first_query, k.size(1) - first_query, q.device)
        return self.rotate(q, first_query), self.rotate(k, 0), bias

    def adapt(self, stored: Dict[str, Tensor], prefix: str, beyond: Callable[[int], str]) -> None:
        """Fits the tensors of a checkpoint to a shorter reach, in place.

        Raises ValueError(beyond(n)) if the checkpoint's reach of n tokens is too short.
        """


class SimpleBias(PositionBias):
    """One learned score per distance, up to a fixed reach that chunks must not exceed."""

    def __init__(self, dim: int, max_positions: int, causal: bool):
        super().__init__(dim, max_positions, causal)
        self.longest = max_positions
        self.weight = nn.Parameter(torch.empty(2 * max_positions - 1))  # distances -(max - 1) .. max - 1
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, first: int, stop: int, device: torch.device) -> Tensor:
        needed = max(-first, stop - 1) + 1
        if needed > self.longest:
            raise ValueError(
                f"position_bias 'simple' covers distances below {self.longest}, but {needed} are needed: "
                "use shorter chunks or sequences, a larger max_positions in training, or position_bias 'rotary'"
            )
        return self.weight[self.longest - 1 + first : self.longest - 1 + stop]

    def adapt(self, stored: Dict[str, Tensor], prefix: str, beyond: Callable[[int], str]) -> None:
        key, reach = f"{prefix}weight", self.longest
        if key not in stored:
            return
        learned = (stored[key].numel() + 1) // 2
        if reach > learned:
            raise ValueError(beyond(learned))
        stored[key] = stored[key][learned - reach : learned + reach - 1]


class RotaryBias(PositionBias):
    """b_ij = <R_i a, R_j b> with learned a and b: depends only on the distance and works at any length."""

    def __init__(self, dim: int, max_positions: int, causal: bool):
        super().__init__(dim, max_positions, causal)
        self.a = nn.Parameter(torch.empty(dim))
        self.b = nn.Parameter(torch.empty(dim))
        nn.init.normal_(self.a, std=0.02)
        nn.init.normal_(self.b, std=0.02)

    def forward(self, first: int, stop: int, device: torch.device) -> Tensor:
        return rotary_distances(self.a, self.b, first, stop)


class RotaryEmbedding(PositionBias):
    """RoPE: rotates queries and keys, and adds no bias."""

    def rotate(self, x: Tensor, positions: Union[int, Tensor]) -> Tensor:
        if not isinstance(positions, Tensor):
            positions = torch.arange(positions, positions + x.size(1), device=x.device)
        return rotate(x, positions)


class AlibiBias(PositionBias):
    """ALiBi: scores fall linearly with distance, with ALiBi's slope for a single head."""

    def forward(self, first: int, stop: int, device: torch.device) -> Tensor:
        return torch.arange(first, stop, device=device).abs().float() * -ops.ALIBI_SLOPE


class T5Bias(PositionBias):
    """T5: one learned score per bucket of distances; buckets of large distances are logarithmic."""

    def __init__(self, dim: int, max_positions: int, causal: bool):
        super().__init__(dim, max_positions, causal)
        self.causal = causal
        self.weight = nn.Parameter(torch.empty(ops.T5_BUCKETS))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, first: int, stop: int, device: torch.device) -> Tensor:
        wide = self.weight.to(at_least_float32(self.weight.dtype))  # its gradients are sums over distances
        return wide[ops.t5_bucket(torch.arange(first, stop, device=device), self.causal)]


POSITION_BIASES: Dict[str, Type[PositionBias]] = {
    "simple": SimpleBias,
    "rotary": RotaryBias,
    "rope": RotaryEmbedding,
    "alibi": AlibiBias,
    "t5": T5Bias,
    "none": PositionBias,
}


# ------------------------------------------------------------------------------------------- attention


def check_attention(config: ModuleConfig) -> None:
    """Checks the options that single-head self-attention and cross attention share."""
    config.check_positive("shared_dim", "max_positions")
    if config.position_bias in ("rotary", "rope") and config.shared_dim % 2:
        width = config.name("shared_dim")
        raise ValueError(
            f"{config.name('position_bias')} {config.position_bias!r} rotates pairs of dimensions and {width} is "
            f"{config.shared_dim}; make {width} even"
        )


def biased_weights(
    q: Tensor,
    k: Tensor,
    position_bias: PositionBias,
    position: Union[int, FixedPlace],
    function: str,
    key_padding: Optional[Tensor] = None,
    outer: bool = False,
) -> Tensor:
    """f(Q K^T / tau + b_rel) for queries (G, n, z) that are all at `position` -> (G, n, m), for `weighted_sum`."""
    keys = k.size(1)
    if isinstance(position, FixedPlace):
        bias = position_bias(1 - position.limit, keys, q.device)  # (limit - 1 + m,)
        bias = None if bias is None else position.bias(bias, keys)
        position = position.number.view(1)
    else:
        bias = position_bias(-position, keys - position, q.device)  # (m,)
    q_rows = position_bias.rotate(q.reshape(-1, 1, q.size(-1)), position)
    rotated = position_bias.rotate(k, 0)
    return weights_at_one_position(q_rows.view_as(q), rotated, function, bias, key_padding, outer=outer)


def attend_token(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: Union[KeyValues, FixedKeyValues],
    position_bias: "TabledBias",
    function: str,
    chunk_size: Optional[int],
    outer: bool = False,
) -> Tuple[Tensor, Union[KeyValues, FixedKeyValues]]:
    """Causal attention of the next token: q, k (R, z), v (R, e) -> (R, e), and the cache with its key and value."""
    if isinstance(cache, FixedKeyValues) and not position_bias.rotates:
        bias = position_bias(1 - cache.last.limit, cache.keys.size(1), q.device)
        return attend_in_storage(q, cache.keys, cache.values, cache.last, bias, function, outer, new=(k, v)), cache
    cache = cache.append(k.unsqueeze(1), v.unsqueeze(1), chunk_size)
    weights = biased_weights(q.unsqueeze(1), cache.keys, position_bias, cache.last, function, cache.padding, outer)
    return weighted_sum(weights, cache.values).squeeze(1), cache.unless_complete(chunk_size)


class TabledBias:
    """A position bias with tables of its scores, cosines and sines, so that they are not recomputed for each token."""

    def __init__(self, bias: PositionBias):
        self.bias = bias
        # Each is replaced as a whole: threads may share it.
        self.tabled: Tuple[int, int, Optional[Tensor]] = (0, 0, None)
        self.earlier: List[Any] = []  # smaller tables, which CUDA graphs may still read
        self.cos_sin: Optional[Tuple[Tensor, Tensor]] = None

    @property
    def rotates(self) -> bool:
        """Whether it rotates queries and keys, and adds no bias."""
        return isinstance(self.bias, RotaryEmbedding)

    def __call__(self, first: int, stop: int, device: torch.device) -> Optional[Tensor]:
        if self.bias.longest is not None:  # the bias is already a table
            return self.bias(first, stop, device)
        start, end, table = self.tabled
        if first < start or stop > end:
            self.earlier.append(table)
            start, end = min(2 * first, start), max(2 * stop, end)
            table = self.bias(start, end, device)
            self.tabled = (start, end, table)
        return None if table is None else table[first - start : stop - start]

    def rotate(self, x: Tensor, first: Union[int, Tensor]) -> Tensor:
        if isinstance(first, Tensor) or not self.rotates:
            return self.bias.rotate(x, first)
        stop, tables = first + x.size(1), self.cos_sin
        if tables is None or len(tables[0]) < stop:
            self.earlier.append(tables)
            tables = self.cos_sin = cos_sin(torch.arange(2 * stop, device=x.device), x.size(-1), x.dtype)
        return turned(x, *(table[first:stop] for table in tables))
