"""Angles after many steps, as fractions of a turn.

In float32, the product of an angle and 100,000 steps would be wrong by 0.01. Devices without float64 multiply numbers
of so few bits that the products are exact.
"""

from typing import Tuple, Union

import torch
from torch import Tensor

ROTARY_BASE = 10000.0  # of the frequencies of rotary positions
GRID = 2.0**12  # half of the bits of a float32
Parts = Tuple[Tensor, Tensor, Tensor]


def fraction_of_turn(turns: Union[Tensor, Parts], steps: Union[int, Tensor]) -> Tensor:
    """turns * steps without whole turns, for whole steps: from -1/2 to 1/2, in the dtype of `turns`.

    It is computed in float64, or in float32 from the parts of `turns`: then it is wrong by at most 1e-7 for less than
    2^24 steps.
    """
    if isinstance(turns, Tensor) and turns.dtype == torch.float64:
        return _without_whole(turns * steps)
    coarse, medium, fine = in_parts(turns) if isinstance(turns, Tensor) else turns
    steps = steps.to(fine.dtype) if isinstance(steps, Tensor) else float(steps)
    high = steps // GRID
    low = steps - GRID * high
    # GRID * coarse is whole, and so are all steps of it. The first three products are exact.
    total = fine * steps + medium * low + _without_whole(GRID * medium * high) + _without_whole(coarse * low)
    return _without_whole(total)


def in_parts(turns: Tensor) -> Parts:
    """Turns below 1 as a multiple of 1 / GRID, one of 1 / GRID^2 and the rest."""
    coarse = torch.round(turns * GRID) / GRID
    medium = torch.round((turns - coarse) * GRID**2) / GRID**2
    return coarse, medium, turns - coarse - medium


def _without_whole(turns: Tensor) -> Tensor:
    return turns - turns.round()
