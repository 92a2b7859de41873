"""Attention of single tokens to keys and values in fixed storage, as one Triton kernel for NVIDIA GPUs."""

from typing import Optional, Tuple

import triton
import triton.language as tl
from torch import Tensor

from mega_fairseq.ops.attention.fixed.storage import FixedPlace
from mega_fairseq.ops.attention.score_kernels import scored, weight
from mega_fairseq.ops.attention.scores import LAPLACE_MEAN, LAPLACE_STD
from mega_fairseq.ops.backend import launch
from mega_fairseq.ops.precision import at_least_float32
from mega_fairseq.ops.rows import WIDE

COLUMNS = 128  # of the values, for one program
BLOCK = 32  # keys at once


@triton.jit(do_not_specialize=["M", "OFFSET", "BEAMS"])
def attend_kernel(
    q, keys, values, number, bias, rows, new_keys, new_values, padding, out, M, OFFSET, BEAMS, stride, Z, E,
    SCALE: tl.constexpr, SOFTMAX: tl.constexpr, LAPLACE: tl.constexpr, OUTER: tl.constexpr, MEAN: tl.constexpr,
    STD: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One row of out (R, E), COLUMNS of it. `number` is the position of the query.

    With `rows` (R, M), keys (R, M, Z) and values (R, M, E) are at the positions before it, of row rows[r, m] at m; the
    program stores new_keys and new_values (R, .) at the position itself. Otherwise, BEAMS rows share keys (S, M, Z) and
    values (S, M, E), but for those of padding (S, M).
    """
    row = tl.program_id(0).to(tl.int64)
    z, e = tl.arange(0, WIDTH), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    last = tl.load(number)
    query = tl.load(q + row * stride + z, mask=z < Z, other=0.0).to(WIDE)
    query *= tl.full([1], SCALE, WIDE)
    largest, total = tl.full([1], -1e30, WIDE), tl.full([1], 0.0, WIDE)
    attended = tl.zeros([COLUMNS], WIDE)
    if rows is not None:
        count = last.to(tl.int32)
        seen = tl.full([1], 1, tl.int32) + count
        here = row * M + last
        key = tl.load(new_keys + row * Z + z, mask=z < Z, other=0.0)
        if tl.program_id(1) == 0:
            tl.store(keys + here * Z + z, key, mask=z < Z)
        value = tl.load(new_values + row * E + e, mask=e < E, other=0.0)
        tl.store(values + here * E + e, value, mask=e < E)
        dot = tl.full([1], 0.0, WIDE) + tl.sum(query * key.to(WIDE), 0)
        position = tl.full([1], 0, tl.int64) + last
        score = scored(dot, bias, OFFSET + position - last, position >= 0, seen.to(WIDE), SCALE, SOFTMAX, OUTER)
        if SOFTMAX:
            largest, total, attended = score, total + 1.0, value.to(WIDE)
        else:
            attended = weight(score, LAPLACE, MEAN, STD) * value.to(WIDE)
    else:
        count = M
        seen = tl.full([1], 0, tl.int32) + M
        if not SOFTMAX:
            for start in range(0, M, BLOCK):
                m = start + tl.arange(0, BLOCK)
                hidden = tl.load(padding + row // BEAMS * M + m, mask=m < M, other=0)
                seen -= tl.sum(hidden.to(tl.int32), 0)
            seen = tl.maximum(seen, 1)
    for start in range(0, count, BLOCK):
        m = start + tl.arange(0, BLOCK)
        inside = m < count
        if rows is not None:
            source = tl.load(rows + row * M + m, mask=inside, other=0)
        else:
            source = row // BEAMS + tl.zeros([BLOCK], tl.int64)
            inside = inside & (tl.load(padding + source * M + m, mask=inside, other=1) == 0)
        at = (source * M + m)[:, None]
        seen_keys = tl.load(keys + at * Z + z[None, :], mask=inside[:, None] & (z < Z)[None, :], other=0.0)
        seen_values = tl.load(values + at * E + e[None, :], mask=inside[:, None] & (e < E)[None, :], other=0.0)
        dots = tl.sum(query[None, :] * seen_keys.to(WIDE), 1)
        scores = scored(dots, bias, OFFSET + m - last, inside, seen.to(WIDE), SCALE, SOFTMAX, OUTER)
        if SOFTMAX:
            larger = tl.maximum(largest, tl.max(tl.where(inside, scores, -1e30), 0))
            weights = tl.where(inside, tl.exp(scores - larger), 0.0)
            shrink = tl.exp(largest - larger)
            total = total * shrink + tl.sum(weights, 0)
            attended = attended * shrink + tl.sum(weights[:, None] * seen_values.to(WIDE), 0)
            largest = larger
        else:
            weights = tl.where(inside, weight(scores, LAPLACE, MEAN, STD), 0.0)
            attended += tl.sum(weights[:, None] * seen_values.to(WIDE), 0)
    if SOFTMAX:
        attended = attended / tl.where(total == 0.0, 1.0, total)
    tl.store(out + row * E + e, attended.to(out.dtype.element_ty), mask=e < E)


def attend_in_storage(
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
    """As `attend_in_storage_naive`."""
    (rows, z), (sources, capacity, e) = q.shape, values.shape
    out = values.new_empty(rows, e)
    stored, (key, value) = (None, (None, None)) if new is None else (place.rows, (t.contiguous() for t in new))
    args = (q, keys, values, place.number, bias, stored, key, value, padding, out, capacity, place.limit - 1)
    softmax, columns = function == "softmax", min(COLUMNS, triton.next_power_of_2(e))
    launch(
        attend_kernel, (rows, triton.cdiv(e, columns)), *args, rows // sources, q.stride(0), z, e,
        SCALE=z**-0.5, SOFTMAX=softmax, LAPLACE=function == "laplace", OUTER=outer and function == "relu2",
        MEAN=LAPLACE_MEAN, STD=LAPLACE_STD, BLOCK=BLOCK, WIDTH=triton.next_power_of_2(z), COLUMNS=columns,
        WIDE=WIDE[at_least_float32(q.dtype)],
    )  # fmt: skip
    return out
