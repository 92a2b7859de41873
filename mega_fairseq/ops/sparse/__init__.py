"""Sparse attention (Child et al. 2019): a query sees a set of about sqrt(n) places instead of all n.

With stride l, summary width c, and places i of a query and j of a key in their window (j <= i if causal):

              first set                      second set
    strided   |i - j| <= l                   (i - j) mod l = 0
    fixed     floor(i / l) = floor(j / l)    j mod l in l - c (v + 1) .. l - c v - 1, the summary of j's block

A head attends to the first set, to the second, or to their union under one softmax; a query that sees no key gives 0.
With s `subblocks`, v is the head's number modulo s, so that heads read different summaries; otherwise v = 0.
"""

from typing import List, NamedTuple, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mega_fairseq.ops.attention.scores import MASKED
from mega_fairseq.ops.precision import at_least_float32, cast_dtype, without_autocast
from mega_fairseq.ops.sparse.parts import LOG_2, Band, Block, Blocks, Column, Keys, Source, Summaries, attend_parts

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
    wide = at_least_float32(dtype) if dtype == torch.float16 or q.device.type == "cpu" else dtype
    q, k, v = (t.to(wide) for t in (q.to(wide) * (q.size(-1) ** -0.5 / LOG_2), k, v))
    finished = None if finished is None else tuple(t.to(wide) for t in finished)
    padding = None
    if not sparsity.causal:  # also of the places that fill the last block
        padding = k.new_zeros(k.shape[:2], dtype=torch.bool) if key_padding is None else key_padding
        padding = padding[..., None, None].expand(-1, -1, k.size(2), 1)
    classes, found = alike_heads(sparsity, q.size(2)), []
    for heads, sets, subblock in classes:
        own = None if finished is None else tuple(t[..., heads, :] for t in finished)
        keys = Keys(*(None if t is None else t[:, :, heads] for t in (k, v, padding)))
        found.append(_attend_alike(q[:, :, heads], keys, sparsity._replace(sets=sets), subblock, own, dropout))
    if len(classes) == 1:
        return found[0].to(dtype)
    out = torch.empty_like(q)
    for (heads, _, _), y in zip(classes, found):
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
    return [found for found in classes if found[0].start < heads]


def _attend_alike(
    q: Tensor, keys: Keys, sparsity: Sparsity, subblock: int, finished: Optional[Tuple[Tensor, Tensor]], dropout: float
) -> Tensor:
    """`sparse_attention` for heads that see the same places, of the "first", "second" or "merged" sets."""
    pattern, sets, stride, causal, summary, _ = sparsity
    (queries, heads), total = q.shape[1:3], keys.k.size(1)
    size = min(stride, total)
    skipped, before, after = (total - queries) // size, (total - queries) % size, -total % size
    band = pattern == "strided" and sets != "second" and total > size  # a single block is all in the first set
    front = int(band and skipped == 0)
    blocks = Blocks(size, -(-total // size) - skipped, skipped, causal, front)

    read: List[Keys] = []
    sources: List[Source] = []
    if pattern == "strided" or sets != "second":
        read.append(keys.map(_by_head, front * size, after + (size if band and not causal else 0)))
        if sets != "second":
            sources.append(Source((Band if band else Block)(blocks), 0))
        if pattern == "strided" and (sets == "second" or (sets == "merged" and band)):
            # Merged, the column leaves out the places 0 and 1 blocks away, which are in the band.
            sources.append(Source(Column(blocks._replace(gap=2 if sets == "merged" else 0)), 0))
    if pattern == "fixed" and sets != "first":
        summaries = _summaries(keys, sparsity, subblock, finished)
        if summaries.k.size(1) > 0:
            past = 0 if finished is None else finished[0].size(1)
            first = stride - summary * (subblock + 1) if sets == "second" else -1
            part = Summaries(blocks._replace(size=stride, skipped=skipped + past, summary=summary, first=first))
            sources.append(Source(part, len(read)))
            read.append(summaries)
    out = attend_parts(_by_head(q, before, after), read, sources, dropout)
    return out.unflatten(0, (-1, heads))[:, :, before : before + queries].transpose(1, 2)


def _by_head(x: Tensor, before: int = 0, after: int = 0) -> Tensor:
    """(G, n, H, z) -> (G H, before + n + after, z), with zeros, or True for masks, at the ends."""
    x = x.transpose(1, 2)
    ends = (x.new_full((*x.shape[:2], size, x.size(3)), x.dtype == torch.bool) for size in (before, after))
    return torch.cat([next(ends), x, next(ends)], 2).flatten(0, 1)  # faster than padding, which fills everything first


def _summaries(keys: Keys, sparsity: Sparsity, subblock: int, finished: Optional[Tuple[Tensor, Tensor]]) -> Keys:
    """The summaries of all blocks side by side, but not of the last one if no query sees it in this set."""
    _, sets, stride, causal, summary, subblocks = sparsity
    total = keys.k.size(1)
    count = (total - 1) // stride if causal and sets == "merged" else -(-total // stride)

    def gather(x: Tensor) -> Tensor:  # (G, m, H, z) -> (G, A c, H, z)
        x = F.pad(x, (0, 0, 0, 0, 0, max(0, count * stride - total)), value=x.dtype == torch.bool)
        blocks = x[:, : count * stride].unflatten(1, (count, stride))
        first = stride - summary * (subblock + 1)
        return blocks[:, :, first : first + summary].flatten(1, 2)

    found = keys.map(gather)
    if finished is not None:
        first = summary * (subblocks - 1 - subblock)
        past = (t[:, :, first : first + summary].flatten(1, 2) for t in finished)
        found = Keys(*(torch.cat([p, t], 1) for p, t in zip(past, found)), None)
    return found.map(_by_head)
