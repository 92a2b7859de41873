"""Sparse attention (Child et al. 2019): a query sees a set of about sqrt(n) places instead of all n.

With stride l, summary width c, and places i of a query and j of a key in their window (j <= i if causal):

              first set                      second set
    strided   |i - j| <= l                   (i - j) mod l = 0
    fixed     floor(i / l) = floor(j / l)    j mod l in l - c (v + 1) .. l - c v - 1, the summary of j's block

A head attends to the first set, to the second, or to their union under one softmax; a query that sees no key gives 0.
With s `subblocks`, v is the head's number modulo s, so that heads read different summaries; otherwise v = 0.
"""

from typing import List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor

from mega_fairseq.ops.attention.scores import MASKED
from mega_fairseq.ops.backend import on_cpu
from mega_fairseq.ops.precision import at_least_float32, cast_dtype, without_autocast
from mega_fairseq.ops.sparse.parts import ALL, LOG_2, Part, attend_parts

PATTERNS = ("strided", "fixed")


class Sparsity(NamedTuple):
    """Which places a query sees."""

    pattern: str  # "strided" or "fixed"
    sets: str  # "first", "second", "merged", or "heads": even heads see the first, odd heads the second
    stride: int
    causal: bool = True
    summary: int = 0
    subblocks: int = 1


def visible_places(sparsity: Sparsity, heads: int, size: int, device: Optional[torch.device] = None) -> Tensor:
    """The sets by their definition: (H, n, n) bool, True = query i sees key j."""
    i, j = torch.arange(size, device=device).unsqueeze(1), torch.arange(size, device=device)
    return torch.stack([_places_of_head(sparsity, head, i, j).expand(size, size) for head in range(heads)])


def _places_of_head(sparsity: Sparsity, head: int, i: Tensor, j: Tensor) -> Tensor:
    pattern, sets, stride, causal, summary, subblocks = sparsity
    if sets == "heads":
        sets, head = ("first", "second")[head % 2], head // 2
    if pattern == "strided":
        first, second = (i - j).abs() <= stride, (i - j) % stride == 0
    else:
        v = head % subblocks
        first = i // stride == j // stride
        second = (j % stride >= stride - summary * (v + 1)) & (j % stride < stride - summary * v)
    seen = {"first": first, "second": second, "merged": first | second}[sets]
    return seen & (j <= i) if causal else seen


def sparse_attention_naive(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sparsity: Sparsity,
    key_padding: Optional[Tensor] = None,
) -> Tensor:
    """Sparse attention with whole matrices: q (G, n, H, z) for the last n of m places, k and v (G, m, H, z).

    `key_padding` is (G, m) bool, True = pad.
    """
    dtype = at_least_float32(q.dtype)
    with without_autocast(q):
        (queries, heads, width), keys = q.shape[1:], k.size(1)
        hidden = ~visible_places(sparsity, heads, keys, q.device)[:, keys - queries :]  # (H, n, m)
        if key_padding is not None:
            hidden = hidden | key_padding[:, None, None]
        scores = torch.einsum("gihz,gjhz->ghij", q.to(dtype) * width**-0.5, k.to(dtype))
        weights = torch.softmax(scores.masked_fill(hidden, MASKED), -1).masked_fill(hidden, 0.0)
        return torch.einsum("ghij,gjhz->gihz", weights, v.to(dtype)).to(v.dtype)


# ------------------------------------------------------------------------------------------- in blocks


def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sparsity: Sparsity,
    key_padding: Optional[Tensor] = None,
    dropout: float = 0.0,
    finished: Optional[Tuple[Tensor, Tensor]] = None,
) -> Tensor:
    """The same without matrices of n x m, from small groups of dense attention, with dropout on weights.

    In causal attention pads come last and need no mask. `finished`, for the causal fixed pattern, are keys and values
    (G, F, c s, H, z) of F blocks before the first place of k: the last c s places of each, which are in summaries.
    """
    dtype = cast_dtype(q)
    # Weights would underflow in float16, and torch.bmm rounds large scores to bfloat16. On GPUs, where float32 is many
    # times slower, scores are rounded.
    wide = at_least_float32(dtype) if dtype == torch.float16 or on_cpu(q) else dtype
    q, k, v, *past = (t.to(wide) for t in (q.to(wide) * (q.size(-1) ** -0.5 / LOG_2), k, v, *(finished or ())))
    padding = None
    if not sparsity.causal:  # also of the places that fill the last block
        padding = k.new_zeros(k.shape[:2], dtype=torch.bool) if key_padding is None else key_padding
        padding = padding[..., None, None].expand(-1, -1, k.size(2), 1)
    classes, results = alike_heads(sparsity, q.size(2)), []
    for heads, sets, subblock in classes:
        tensors = [None if t is None else t[..., heads, :] for t in (q, k, v, padding, *past)]
        results.append(_attend_alike(tensors, sparsity._replace(sets=sets), subblock, dropout))
    if len(classes) == 1:
        return results[0].to(dtype)
    out = torch.empty_like(q)
    for (heads, _, _), y in zip(classes, results):
        out[:, :, heads] = y
    return out.to(dtype)


def alike_heads(sparsity: Sparsity, heads: int) -> List[Tuple[slice, str, int]]:
    """Heads that see the same places: which ones, their sets, and the number of their subblock."""
    subblocks = sparsity.subblocks if sparsity.pattern == "fixed" else 1
    if sparsity.sets == "heads":
        odd = [(slice(1 + 2 * v, None, 2 * subblocks), "second", v) for v in range(subblocks)]
        classes = [(slice(0, None, 2), "first", 0), *odd]
    elif sparsity.sets == "first":
        classes = [(slice(0, None), "first", 0)]
    else:
        classes = [(slice(v, None, subblocks), sparsity.sets, v) for v in range(subblocks)]
    return [alike for alike in classes if alike[0].start < heads]


def _attend_alike(tensors: Sequence[Optional[Tensor]], sparsity: Sparsity, subblock: int, dropout: float) -> Tensor:
    """`sparse_attention` for heads that see the same places, of the "first", "second" or "merged" sets."""
    q, k, v, padding, *past = tensors
    pattern, sets, stride, causal, summary, subblocks = sparsity
    (queries, heads), total = q.shape[1:3], k.size(1)
    size = min(stride, total)  # of a block
    skipped, before, after = (total - queries) // size, (total - queries) % size, -total % size  # blocks; places
    count = -(-total // size) - skipped  # blocks of queries
    reads_blocks, parts = pattern == "strided" or sets != "second", []

    band = pattern == "strided" and sets != "second" and total > size  # a single block is all in the first set
    front, back = size * (band and skipped == 0), size * (band and not causal)  # zeros in place of blocks
    part = Part(groups=count, rows=size, keys=size, step=size, first=front + skipped * size, start=0 if causal else ALL)
    if band:
        reach = size if causal else 2 * size
        parts.append(part._replace(keys=size + reach, first=part.first - size, start=-reach, span=reach, missing=front))
    elif sets != "second":
        parts.append(part)
    if pattern == "strided" and (sets == "second" or (sets == "merged" and band)):
        part = Part(groups=size, rows=count, keys=skipped + count, step=1, stride=size, first=front)
        if causal:  # without the places 0 and 1 blocks away if they are in the band
            part = part._replace(start=2 * band - skipped)
        elif band:
            part = part._replace(start=-1 - skipped, span=2, outside=1)
        parts.append(part)

    summaries, place = 0, stride - summary * (subblock + 1)  # blocks; place of the summary in each
    if pattern == "fixed" and sets != "first":
        summaries = -(-(total - (causal and sets == "merged")) // stride)  # without the last block if no query sees it
        finished = past[0].size(1) if past else 0
        keys, start = summary * (summaries + finished), -stride * (skipped + finished)
        first = reads_blocks * (total + after)
        part = Part(groups=1, rows=count * size, keys=keys, step=keys, first=first, width=summary, block=stride)
        if sets == "second" and causal:
            part = part._replace(start=start + place, within=1)
        elif causal:  # of earlier blocks
            part = part._replace(start=start + stride)
        elif sets == "merged":  # of other blocks
            part = part._replace(start=start, span=stride - 1, outside=1)
        parts += [part] if keys else []

    def lay_out(x: Tensor, past: Optional[Tensor] = None) -> Tensor:
        """(G, m, H, w) -> (G H, ., w): the keys of all parts, with zeros, or True for masks, between them."""
        pieces = [_filled(x, front), x, _filled(x, after + back)] if reads_blocks else []
        if past is not None:
            first = summary * (subblocks - 1 - subblock)
            pieces.append(past[:, :, first : first + summary].flatten(1, 2))
        if summaries:
            whole = summaries * stride
            blocks = torch.cat([x, _filled(x, whole - total)], 1) if whole > total else x[:, :whole]
            pieces.append(blocks.unflatten(1, (-1, stride))[:, :, place : place + summary].flatten(1, 2))
        return _by_head(pieces)

    k, v = (lay_out(*pair) for pair in zip((k, v), past or (None, None)))
    padding = None if padding is None else lay_out(padding)
    out = attend_parts(_by_head([_filled(q, before), q, _filled(q, after)]), k, v, padding, parts, dropout)
    return out.unflatten(0, (-1, heads))[:, :, before : before + queries].transpose(1, 2)


def _filled(x: Tensor, count: int) -> Tensor:
    """(G, count, H, z) of zeros, or True for masks."""
    return x.new_full((x.size(0), max(0, count), *x.shape[2:]), x.dtype == torch.bool)


def _by_head(pieces: List[Tensor]) -> Tensor:
    """(G, ., H, z) side by side -> (G H, ., z)."""
    return torch.cat([x.transpose(1, 2) for x in pieces], 2).flatten(0, 1)
