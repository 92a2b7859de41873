"""Relative position biases b_rel of eq. 11, one class each: scores for a range of distances.

A bias returns one score for each of the distances (key minus query position) first .. stop - 1. It may also rotate
queries and keys, and may have an equivalent form as extra columns of both.
"""

from typing import Callable, Dict, Optional, Tuple, Type

import torch
from torch import Tensor, nn

from mega_fairseq.modules.description import DISTANCE, Curves, Description
from mega_fairseq.ops.attention import position as ops
from mega_fairseq.ops.precision import at_least_float32


class PositionBias(nn.Module):
    """The base class of position biases; it adds no bias itself. `dim` is the width z of queries and keys."""

    longest: Optional[int] = None  # the longest sequence that it covers; None for any length
    rotates = False  # whether it rotates queries and keys
    extra_columns = 0  # r, the number of columns of its other form; 0 if it has none

    def __init__(self, dim: int, max_positions: int, causal: bool):
        super().__init__()

    def forward(self, first: int, stop: int, device: torch.device) -> Optional[Tensor]:
        """Scores for distances first .. stop - 1: (stop - first,), or None for no bias."""
        return None

    def columns(self, first_query: int, queries: int, keys: int) -> Tuple[Tensor, Tensor]:
        """The bias as extra columns of queries (n, r) and keys (m, r), if it has this form."""
        raise NotImplementedError

    def rotate(self, x: Tensor, first: int) -> Tensor:
        """Queries or keys (B, n, z) at positions first, first + 1, ..., rotated by the biases that do so."""
        return self.rotate_at(x, torch.arange(first, first + x.size(1), device=x.device)) if self.rotates else x

    def rotate_at(self, x: Tensor, positions: Tensor) -> Tensor:
        """The same at these positions, (n,) or (B, n)."""
        return x

    def describe(self, positions: int, causal: bool) -> Description:
        """The scores of all distances between this number of positions, if they are learned."""
        parameter = next(self.parameters(), None)
        if parameter is None:
            return []
        first = 1 - positions
        scores = self(first, 1 if causal else positions, parameter.device)
        return [Curves("position scores", DISTANCE, first, scores.unsqueeze(0))]

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
        key, own = f"{prefix}weight", self.longest
        if key not in stored:
            return
        learned = (stored[key].numel() + 1) // 2
        if own > learned:
            raise ValueError(beyond(learned))
        stored[key] = stored[key][learned - own : learned + own - 1]


class RotaryBias(PositionBias):
    """b_ij = <R_i a, R_j b> with learned a and b: depends only on the distance and works at any length."""

    def __init__(self, dim: int, max_positions: int, causal: bool):
        super().__init__(dim, max_positions, causal)
        self.extra_columns = dim
        self.a = nn.Parameter(torch.empty(dim))
        self.b = nn.Parameter(torch.empty(dim))
        nn.init.normal_(self.a, std=0.02)
        nn.init.normal_(self.b, std=0.02)

    def forward(self, first: int, stop: int, device: torch.device) -> Tensor:
        return ops.rotary_distances(self.a, self.b, torch.arange(first, stop, device=device))

    def columns(self, first_query: int, queries: int, keys: int) -> Tuple[Tensor, Tensor]:
        stop = first_query + queries
        of_queries, of_keys = ops.rotary_columns(self.a, self.b, torch.arange(max(stop, keys), device=self.a.device))
        return of_queries[first_query:stop], of_keys[:keys]


class RotaryEmbedding(PositionBias):
    """RoPE: rotates queries and keys, and adds no bias."""

    rotates = True

    def rotate_at(self, x: Tensor, positions: Tensor) -> Tensor:
        return ops.rotate(x, positions)


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
