"""What Triton kernels over rows (R, width) share: tiles, launches and sums over rows.

A kernel that computes gradients of rows also adds them up, as the gradient of a bias: each of P programs takes every
P-th tile of rows and stores its sums, (P, width) in float32 or better. `add_sums` adds those of all programs, and
`add_both_sums` those of two parameters that are side by side. Torch would read the gradients again, at a quarter of
the memory's bandwidth.
"""

from typing import Any, Tuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mega_fairseq.ops.backend import launch
from mega_fairseq.ops.precision import at_least_float32

TILE = 1024  # elements that a program holds at once
PROGRAMS = 1024  # at most so many programs share the rows of a sum, and each has at least so many rows:
LEAST_ROWS = 8
WIDE = {torch.float32: tl.float32, torch.float64: tl.float64}


@triton.jit
def tile_count(R, ROWS: tl.constexpr):
    """How many tiles of rows this program has."""
    return tl.cdiv(tl.cdiv(R, ROWS) - tl.program_id(0), tl.num_programs(0))


@triton.jit
def tile(turn, R, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The rows (ROWS, 1) and columns (1, COLUMNS) of this program's tile, and which of its elements exist."""
    number = tl.program_id(0) + turn * tl.num_programs(0)
    row = (number.to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    return row, column, (row < R) & (column < width)


@triton.jit
def store_sums(sums, values, stride, width, COLUMNS: tl.constexpr):
    """Stores the column sums of values (ROWS, COLUMNS) as this program's row of sums (P, stride)."""
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    at = tl.program_id(0).to(tl.int64) * stride + column
    tl.store(sums + at, tl.sum(values, 0).to(sums.dtype.element_ty), mask=column < width)


@triton.jit
def silu(x):
    """silu(x) and its derivative."""
    sigmoid = tl.sigmoid(x)
    return x * sigmoid, sigmoid * (1.0 + x * (1.0 - sigmoid))


@triton.jit
def column_sums(x, sums, R, stride, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr):
    """sums (P, width) of x (R, stride)."""
    total = tl.zeros([ROWS, COLUMNS], WIDE)
    for turn in range(tile_count(R, ROWS)):
        row, column, inside = tile(turn, R, width, ROWS, COLUMNS)
        total += tl.load(x + row * stride + column, mask=inside, other=0.0).to(WIDE)
    store_sums(sums, total, width, width, COLUMNS)


@triton.jit
def add_rows(
    x, left, right, R, stride, width, LEFT, RIGHT, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """The sums of columns below LEFT of x (R, stride), and of those from RIGHT on."""
    total = tl.zeros([ROWS, COLUMNS], WIDE)
    for turn in range(tile_count(R, ROWS)):
        row, column, inside = tile(turn, R, width, ROWS, COLUMNS)
        total += tl.load(x + row * stride + column, mask=inside, other=0.0).to(WIDE)
    column, sums = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS), tl.sum(total, 0)
    tl.store(left + column, sums.to(left.dtype.element_ty), mask=column < LEFT)
    tl.store(right + column - RIGHT, sums.to(right.dtype.element_ty), mask=(column >= RIGHT) & (column < width))


def launch_rows(
    kernel: Any, programs: int, width: int, like: Tensor, *args: Any, columns: int = TILE, tile: int = TILE, **options
) -> None:
    """Launches a kernel with tiles of `tile` elements in at most `columns` columns; `like` has the dtype of rows."""
    columns = min(columns, triton.next_power_of_2(width))
    sizes = {"ROWS": max(1, tile // columns), "COLUMNS": columns, "WIDE": WIDE[at_least_float32(like.dtype)]}
    launch(kernel, (programs, triton.cdiv(width, columns)), *args, **options, **sizes)


def with_rows(x: Tensor) -> Tensor:
    """x (R, width), copied if the elements of a row are not side by side: kernels take the stride of rows only."""
    return x if x.stride(1) == 1 else x.contiguous()


def all_tiles(rows: int, width: int) -> int:
    """The number of programs that have one tile each."""
    return triton.cdiv(rows, max(1, TILE // triton.next_power_of_2(width)))


def new_sums(x: Tensor, width: int) -> Tensor:
    """Storage for the sums of P programs over the rows of x: (P, width)."""
    programs = max(1, min(PROGRAMS, triton.cdiv(x.size(0), LEAST_ROWS)))
    return x.new_empty(programs, width, dtype=at_least_float32(x.dtype))


def add_sums(sums: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum of the rows of `sums`, whose columns may be some of a wider tensor, rounded once."""
    (count, width), total = sums.shape, sums.new_empty(sums.size(1), dtype=dtype)
    launch_rows(column_sums, 1, width, sums, sums, total, count, sums.stride(0), width, columns=16, tile=4096)
    return total


def add_both_sums(sums: Tensor, dtype: torch.dtype, left: int, right: int) -> Tuple[Tensor, Tensor]:
    """The sum of the rows of `sums`, rounded once: its first `left` columns, and those from `right` on."""
    count, width = sums.shape
    totals = sums.new_empty(left, dtype=dtype), sums.new_empty(width - right, dtype=dtype)
    args = (sums, *totals, count, sums.stride(0), width, left, right)
    launch_rows(add_rows, 1, width, sums, *args, columns=16, tile=4096)
    return totals


def sum_of_rows(x: Tensor) -> Tensor:
    """The column sums of x (R, width), in its dtype."""
    sums = new_sums(x, x.size(1))
    launch_rows(column_sums, len(sums), x.size(1), x, x, sums, x.size(0), x.stride(0), x.size(1), tile=4 * TILE)
    return add_sums(sums, x.dtype)
