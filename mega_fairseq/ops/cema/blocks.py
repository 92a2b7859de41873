"""The complex EMA in blocks of C steps (`ops/block_scan`): its tables, in pairs of reals."""

from functools import partial
from typing import Optional, Tuple, Union

import torch
from torch import Tensor

from mega_fairseq.ops.block_scan import BlockTables, in_blocks, state_after
from mega_fairseq.ops.cema.naive import CEMACoefficients, complex_powers, complex_product
from mega_fairseq.ops.diagonals import toeplitz_matrix
from mega_fairseq.ops.padding import zeros_at_pads


def cema_blocks(
    x: Tensor,
    c: CEMACoefficients,
    state: Optional[Tensor] = None,
    skip: Optional[Tensor] = None,
    lengths: Optional[Tensor] = None,
) -> Tuple[Tensor, Tensor]:
    """`cema` in blocks."""
    state = None if state is None else state.flatten(2)
    y, end = in_blocks(zeros_at_pads(x, lengths), state, partial(_block_tables, c, skip), partial(_carry, c), lengths)
    return zeros_at_pads(y, lengths).to(x.dtype), end.unflatten(2, (-1, 2))


def final_state(x: Tensor, c: CEMACoefficients) -> Tensor:
    """The state after x (B, L, D), from a state of zeros and without its outputs: (B, D, N, 2)."""
    return state_after(x, partial(_block_tables, c, None), partial(_carry, c)).unflatten(2, (-1, 2))


def _carry(c: CEMACoefficients, state: Tensor, steps: Union[int, Tensor]) -> Tensor:
    """What is left of a state (..., D, 2 N) after so many steps."""
    return complex_product(complex_powers(c, steps), state.unflatten(-1, (-1, 2))).flatten(-2)


def _block_tables(c: CEMACoefficients, skip: Optional[Tensor], size: int) -> BlockTables:
    steps = torch.arange(size + 1, device=c.expand.device)
    powers = complex_powers(c, steps.view(-1, 1, 1)).transpose(0, 1)  # (D, C + 1, N, 2): q^t
    entering = c.expand[:, None, :, None] * powers[:, :-1]  # what is left of an input after t steps
    leaving = complex_product(c.project.unsqueeze(1), powers[:, 1:])
    signs = leaving.new_tensor([1.0, -1.0])  # of real and imaginary part in the real part of a product
    entering, spread = entering.flatten(2), (leaving * signs).flatten(2).transpose(1, 2)
    taps = torch.matmul(entering, (c.project * signs).flatten(1).unsqueeze(-1)).squeeze(-1)  # (D, C)
    present = taps[:, :1] if skip is None else taps[:, :1] + skip.unsqueeze(-1)
    within = toeplitz_matrix(torch.cat([torch.zeros_like(taps[:, 1:]), present, taps[:, 1:]], -1), size, size)
    return BlockTables(within, entering.flip(1), spread, powers[:, -1].unsqueeze(0))
