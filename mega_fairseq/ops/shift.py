"""Token shift: half of each token's channels are those of the token before (time mixing of RWKV)."""

from typing import Optional, Tuple

import torch
from torch import Tensor


def token_shift(x: Tensor, last: Optional[Tensor] = None, lengths: Optional[Tensor] = None) -> Tuple[Tensor, Tensor]:
    """x (B, L, D) -> [x_{t-1} in the first floor(D / 2) channels, x_t in the others], and the next `last`.

    `last` (B, floor(D / 2)) has the channels of the token before the first, None for zeros. `lengths` (B,) marks right
    padding; a row without tokens keeps its `last`.
    """
    half = x.size(-1) // 2
    first = x.new_zeros(x.size(0), half) if last is None else last.to(x.dtype)
    moved = torch.cat([first.unsqueeze(1), x[..., :half]], 1)  # (B, 1 + L, D / 2), the token before each place
    shifted = torch.cat([moved[:, :-1], x[..., half:]], -1)
    if lengths is None:
        return shifted, moved[:, -1].clone()  # a view would keep the whole sequence alive
    index = lengths.view(-1, 1, 1).expand(-1, 1, half)
    return shifted, moved.gather(1, index).squeeze(1)


def shifted_token(x: Tensor, last: Tensor) -> Tuple[Tensor, Tensor]:
    """`token_shift` for one token: x (R, D) after `last` (R, floor(D / 2))."""
    half = last.size(1)
    return torch.cat([last.to(x.dtype), x[:, half:]], 1), x[:, :half]
