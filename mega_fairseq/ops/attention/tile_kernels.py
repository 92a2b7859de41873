"""The weights of a tile and their gradients by one Triton kernel, between the products of `tiles.py`."""

from typing import Optional, Tuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mega_fairseq.ops.attention.score_kernels import scored, weight, weight_slope
from mega_fairseq.ops.attention.scores import LAPLACE_MEAN, LAPLACE_STD, MASKED
from mega_fairseq.ops.attention.tile_weights import Inputs, Tile
from mega_fairseq.ops.backend import launch
from mega_fairseq.ops.precision import at_least_float32
from mega_fairseq.ops.rows import WIDE

ELEMENTS, WARPS = 2048, 4  # of a program's part of the tile
CONSTANTS = {"MASKED": MASKED, "MEAN": LAPLACE_MEAN, "STD": LAPLACE_STD}


@triton.jit
def biased(
    scores, bias, padding, seen, row, column, R, T, M, H, padding_stride, seen_group, seen_row,
    SOFTMAX: tl.constexpr, OUTER: tl.constexpr, CAUSAL: tl.constexpr, SCALE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Scores of these rows (ROWS, 1) and keys (1, COLUMNS), as f takes them, and which of them a row sees."""
    group, t = row // T, row % T
    visible = (row < R) & (column < M)
    if CAUSAL:
        visible = visible & (column <= M - T + t)
    if padding is not None:
        visible = visible & (tl.load(padding + group * padding_stride + column, mask=visible, other=1) == 0)
    x = tl.load(scores + row * M + column, mask=visible, other=0.0).to(WIDE)
    count = tl.full([1, 1], 1, WIDE)
    if not SOFTMAX:
        count = tl.load(seen + group * seen_group + t * seen_row, mask=row < R, other=1.0).to(WIDE)
    at = group % H * (T + M - 1) + column - t + T - 1
    return scored(x, bias, at, visible, count, SCALE, SOFTMAX, OUTER), visible, count


@triton.jit
def weighed(
    x, visible, largest, total, SOFTMAX: tl.constexpr, LAPLACE: tl.constexpr, MEAN: tl.constexpr, STD: tl.constexpr
):
    """f(x), zero for keys that a row does not see, and its derivative; softmax's also has the mean of gradients."""
    if SOFTMAX:
        y = tl.exp(x - largest) / total
        slope = y
    else:
        y, slope = weight(x, LAPLACE, MEAN, STD), weight_slope(x, LAPLACE, MEAN, STD)
    return tl.where(visible, y, 0.0), slope


@triton.jit
def factor(
    multiplier, keep, row, column, visible, T, M, H, keep_group, keep_row, KEEP_SCALE: tl.constexpr, WIDE: tl.constexpr
):
    """The multiplier and dropout of weights, and dropout alone."""
    group, t = row // T, row % T
    kept = tl.full([1, 1], 1.0, WIDE)
    if keep is not None:
        at = group.to(tl.int64) * keep_group + t * keep_row + column
        kept = tl.load(keep + at, mask=visible, other=0).to(WIDE) * tl.full([1, 1], KEEP_SCALE, WIDE)
    both = kept
    if multiplier is not None:
        at = group % H * (T + M - 1) + column - t + T - 1
        both = kept * tl.load(multiplier + at, mask=visible, other=0.0).to(WIDE)
    return both, kept


@triton.jit
def statistics(
    scores, bias, padding, seen, row, R, T, M, H, padding_stride, seen_group, seen_row,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The largest score of each row, and the sum of the others' exponentials relative to it; of softmax."""
    largest = tl.where(row < R, tl.full([1, 1], MASKED, WIDE), 0.0)
    total = tl.zeros_like(largest)
    for start in range(0, M, COLUMNS):
        column = start + tl.arange(0, COLUMNS)[None, :]
        x, visible, _ = biased(
            scores, bias, padding, seen, row, column, R, T, M, H, padding_stride, seen_group, seen_row,
            True, False, CAUSAL, 1.0, WIDE,
        )  # fmt: skip
        larger = tl.maximum(largest, tl.max(tl.where(visible, x, MASKED), 1)[:, None])
        total = total * tl.exp(largest - larger) + tl.sum(tl.where(visible, tl.exp(x - larger), 0.0), 1)[:, None]
        largest = larger
    return largest, tl.where(total == 0.0, 1.0, total)


@triton.jit
def weigh(
    scores, grad, out, dscores, products, bias, multiplier, padding, keep, seen, R, T, M, H,
    padding_stride, keep_group, keep_row, seen_group, seen_row, KEEP_SCALE: tl.constexpr, SOFTMAX: tl.constexpr,
    LAPLACE: tl.constexpr, OUTER: tl.constexpr, CAUSAL: tl.constexpr, SCALE: tl.constexpr, MASKED: tl.constexpr,
    MEAN: tl.constexpr, STD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """out (G, T, M): the weights of scores (G, T, M), R = G T; and if their gradient `grad` is given, dscores, that of
    scores with their bias, and products, that of the multiplier's matrix. out and dscores may be scores and grad."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    largest, total = tl.zeros([1, 1], WIDE), tl.full([1, 1], 1.0, WIDE)
    mean = tl.zeros([ROWS, 1], WIDE)
    if SOFTMAX:
        largest, total = statistics(
            scores, bias, padding, seen, row, R, T, M, H, padding_stride, seen_group, seen_row,
            MASKED, CAUSAL, COLUMNS, WIDE,
        )  # fmt: skip
    if SOFTMAX and grad is not None:
        for start in range(0, M, COLUMNS):
            column = start + tl.arange(0, COLUMNS)[None, :]
            x, visible, _ = biased(
                scores, bias, padding, seen, row, column, R, T, M, H, padding_stride, seen_group,
                seen_row, SOFTMAX, OUTER, CAUSAL, SCALE, WIDE,
            )  # fmt: skip
            y, _ = weighed(x, visible, largest, total, SOFTMAX, LAPLACE, MEAN, STD)
            both, _ = factor(multiplier, keep, row, column, visible, T, M, H, keep_group, keep_row, KEEP_SCALE, WIDE)
            dy = tl.load(grad + row * M + column, mask=visible, other=0.0).to(WIDE)
            mean += tl.sum(y * dy * both, 1)[:, None]
    for start in range(0, M, COLUMNS):
        column = start + tl.arange(0, COLUMNS)[None, :]
        at, inside = row * M + column, (row < R) & (column < M)
        x, visible, count = biased(
            scores, bias, padding, seen, row, column, R, T, M, H, padding_stride, seen_group, seen_row,
            SOFTMAX, OUTER, CAUSAL, SCALE, WIDE,
        )  # fmt: skip
        y, slope = weighed(x, visible, largest, total, SOFTMAX, LAPLACE, MEAN, STD)
        both, kept = factor(multiplier, keep, row, column, visible, T, M, H, keep_group, keep_row, KEEP_SCALE, WIDE)
        if grad is not None:
            dy = tl.load(grad + at, mask=visible, other=0.0).to(WIDE)
            dx = tl.where(visible, slope * (dy * both - mean), 0.0)
            if OUTER:
                dx = dx / tl.sqrt(count)
            if products is not None:
                tl.store(products + at, (dy * kept * y).to(products.dtype.element_ty), mask=inside)
            tl.store(dscores + at, dx.to(dscores.dtype.element_ty), mask=inside)
        tl.store(out + at, (y * both).to(out.dtype.element_ty), mask=inside)


def _launch(tensors: Tuple[Optional[Tensor], ...], x: Inputs, tile: Tile, seen: Optional[Tensor]) -> None:
    scores = tensors[0]
    (groups, count, reach), wide = scores.shape, WIDE[at_least_float32(scores.dtype)]
    vectors = (None if t is None else t[tile.heads, tile.distances].contiguous() for t in (x.bias, x.multiplier))
    padding = None if x.key_padding is None else x.key_padding[tile.groups, tile.keys]
    keep = None if x.keep is None else x.keep[tile[:3]]
    if seen is not None:
        seen = seen.expand(groups, count, 1)
    strides = [0 if padding is None else padding.stride(0)]
    strides += [stride for t in (keep, seen) for stride in ((0, 0) if t is None else t.stride()[:2])]
    columns = min(ELEMENTS, triton.next_power_of_2(reach))
    rows = min(max(1, ELEMENTS // columns), triton.next_power_of_2(groups * count))
    args = (*vectors, padding, keep, seen, groups * count, count, reach, tile.heads.stop - tile.heads.start)
    launch(
        weigh, (triton.cdiv(groups * count, rows),), *tensors, *args, *strides, KEEP_SCALE=float(x.keep_scale),
        SOFTMAX=x.function == "softmax", LAPLACE=x.function == "laplace", OUTER=x.outer and x.function == "relu2",
        CAUSAL=x.causal, SCALE=x.scale, ROWS=rows, COLUMNS=columns, WIDE=wide, num_warps=WARPS, **CONSTANTS,
    )  # fmt: skip


def _place(x: Inputs, scores: Tensor) -> Tensor:
    """Where results go that are computed from scores: into their place, or to float32 if float16 could overflow."""
    if x.function == "softmax" or scores.dtype != torch.float16:
        return scores
    return torch.empty_like(scores, dtype=torch.float32)


def weights(x: Inputs, tile: Tile, scores: Tensor, seen: Optional[Tensor]) -> Tensor:
    """The weights of a tile's scores (G', T, keys)."""
    out = _place(x, scores)
    _launch((scores, None, out, None, None), x, tile, seen)
    return out


def gradients(
    x: Inputs, tile: Tile, scores: Tensor, grad: Tensor, seen: Optional[Tensor]
) -> Tuple[Tensor, Tensor, Optional[Tensor]]:
    """The weights again, and from their gradient that of biased scores and of the multiplier's matrix."""
    out, dscores = _place(x, scores), _place(x, grad)
    products = None if x.multiplier is None else torch.empty_like(dscores)
    _launch((scores, grad, out, dscores, products), x, tile, seen)
    return out, dscores, products
