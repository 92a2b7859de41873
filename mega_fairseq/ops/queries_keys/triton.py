"""`queries_keys` by one Triton kernel forward and one backward, which also adds up the gradients of kappa and mu."""

from typing import List, Tuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mega_fairseq.ops.operators import operator
from mega_fairseq.ops.rows import (
    add_both_sums,
    all_tiles,
    launch_rows,
    new_sums,
    silu,
    store_sums,
    tile,
    tile_count,
    with_rows,
)


@triton.jit
def activated(x, SILU: tl.constexpr):
    """f(x) and its derivative."""
    if SILU:
        y, slope = silu(x)
    else:
        y, slope = x, tl.zeros_like(x) + 1.0
    return y, slope


@triton.jit
def scale(
    before, kappa, mu, queries, keys, R, stride, width,
    SILU: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Queries and keys (R, width) from `before`, the first columns of (R, stride)."""
    row, column, inside = tile(0, R, width, ROWS, COLUMNS)
    at, exists = row * width + column, column < width
    z, _ = activated(tl.load(before + row * stride + column, mask=inside, other=0.0).to(WIDE), SILU)
    of_queries = tl.load(kappa + column, mask=exists, other=0.0).to(WIDE) * z
    of_keys = tl.load(kappa + width + column, mask=exists, other=0.0).to(WIDE) * z
    of_queries += tl.load(mu + column, mask=exists, other=0.0).to(WIDE)
    of_keys += tl.load(mu + width + column, mask=exists, other=0.0).to(WIDE)
    tl.store(queries + at, of_queries.to(queries.dtype.element_ty), mask=inside)
    tl.store(keys + at, of_keys.to(keys.dtype.element_ty), mask=inside)


@triton.jit
def scale_backward(
    before, kappa, dqueries, dkeys, dbefore, sums, R, width,
    SILU: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The gradient of `before`, and `sums` (P, 4 width) of those of kappa and mu."""
    kappa_queries, kappa_keys = tl.zeros([ROWS, COLUMNS], WIDE), tl.zeros([ROWS, COLUMNS], WIDE)
    mu_queries, mu_keys = tl.zeros([ROWS, COLUMNS], WIDE), tl.zeros([ROWS, COLUMNS], WIDE)
    for turn in range(tile_count(R, ROWS)):
        row, column, inside = tile(turn, R, width, ROWS, COLUMNS)
        at, exists = row * width + column, column < width
        z, slope = activated(tl.load(before + at, mask=inside, other=0.0).to(WIDE), SILU)
        of_queries = tl.load(dqueries + at, mask=inside, other=0.0).to(WIDE)
        of_keys = tl.load(dkeys + at, mask=inside, other=0.0).to(WIDE)
        dz = of_queries * tl.load(kappa + column, mask=exists, other=0.0).to(WIDE)
        dz += of_keys * tl.load(kappa + width + column, mask=exists, other=0.0).to(WIDE)
        tl.store(dbefore + at, (dz * slope).to(dbefore.dtype.element_ty), mask=inside)
        kappa_queries += of_queries * z
        kappa_keys += of_keys * z
        mu_queries += of_queries
        mu_keys += of_keys
    store_sums(sums, kappa_queries, 4 * width, width, COLUMNS)
    store_sums(sums + width, kappa_keys, 4 * width, width, COLUMNS)
    store_sums(sums + 2 * width, mu_queries, 4 * width, width, COLUMNS)
    store_sums(sums + 3 * width, mu_keys, 4 * width, width, COLUMNS)


def _forward(before: Tensor, kappa: Tensor, mu: Tensor, silu: bool) -> Tuple[Tensor, Tensor]:
    before, kappa, mu, (rows, width) = with_rows(before), kappa.contiguous(), mu.contiguous(), before.shape
    queries, keys = _fake(before, kappa, mu, silu)
    args = (before, kappa, mu, queries, keys, rows, before.stride(0), width)
    launch_rows(scale, all_tiles(rows, width), width, queries, *args, SILU=silu)
    return queries, keys


def _fake(before: Tensor, kappa: Tensor, mu: Tensor, silu: bool) -> Tuple[Tensor, Tensor]:
    dtype = torch.promote_types(before.dtype, kappa.dtype)
    return tuple(before.new_empty(before.shape, dtype=dtype) for _ in range(2))


def _backward(grads, _, before: Tensor, kappa: Tensor, mu: Tensor, silu: bool) -> List[Tensor]:
    """From the gradients of queries and keys, of which one may be None."""
    before, kappa, (count, width) = before.contiguous(), kappa.contiguous(), before.shape
    dqueries, dkeys = (torch.zeros_like(before) if t is None else t.contiguous() for t in grads)
    dbefore, sums = torch.empty_like(before), new_sums(before, 4 * width)
    args = (before, kappa, dqueries, dkeys, dbefore, sums, count, width)
    launch_rows(scale_backward, len(sums), width, before, *args, SILU=silu, num_warps=8)
    return [dbefore, *(t.view(2, width) for t in add_both_sums(sums, kappa.dtype, 2 * width, 2 * width))]


_queries_keys = operator(
    "queries_keys(Tensor before, Tensor kappa, Tensor mu, bool silu) -> (Tensor, Tensor)",
    _forward,
    _fake,
    _backward,
    saved=slice(0),
)


def queries_keys(before: Tensor, kappa: Tensor, mu: Tensor, activation: str = "silu") -> Tuple[Tensor, Tensor]:
    both = _queries_keys(before.flatten(0, 1), kappa, mu, activation == "silu")
    return tuple(t.view(before.shape) for t in both)
