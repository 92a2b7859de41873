"""Attention inside chunks, for any length, from any carried state (paper, section 3.3: Mega-chunk).

A causal stack is a recurrent model: what it must remember of a chunk that is not finished are that chunk's keys and
values. `KeyValues` is that memory. Any split of a sequence gives the same outputs, because every piece first
completes the chunk that the last one left open.
"""

from typing import Callable, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from mega_fairseq.ops.padding import Alignment, padding_from_lengths
from mega_fairseq.ops.precision import is_compiling

# (queries, keys, values, key padding) of whole groups -> outputs; the last query stands at the last key if causal
Attend = Callable[[Tensor, Tensor, Tensor, Optional[Tensor]], Tensor]


class KeyValues(NamedTuple):
    """The unfinished chunk, or everything so far where attention is not chunked."""

    keys: Tensor  # (B, m, z)
    values: Tensor  # (B, m, e)
    padding: Optional[Tensor] = None  # (B, m) bool, True = unused: only where rows stand at different positions


def chunked(
    attend: Attend,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chunk_size: Optional[int],
    padding: Optional[Tensor] = None,
) -> Tensor:
    """q (B, n, z) against k (B, m + n, z) and v (B, m + n, e), m < chunk_size keys before the first query -> (B, n, e).

    An open chunk, whole chunks, and what is left over are attended to apart: no caller pads to a chunk.
    """
    if chunk_size is None:
        return attend(q, k, v, padding)
    batch, keys = k.shape[:2]
    cached = keys - q.size(1)

    def piece(start: int, stop: int, count: int) -> Tensor:
        def fold(t: Tensor, begin: int, end: int) -> Tensor:
            return t[:, begin:end].reshape(batch * count, -1, *t.shape[2:])  # (B, K c, .) -> (B K, c, .)

        pads = None if padding is None else fold(padding, start, stop)
        q_start = max(0, start - cached)
        out = attend(fold(q, q_start, stop - cached), fold(k, start, stop), fold(v, start, stop), pads)
        return out.view(batch, stop - cached - q_start, out.size(-1))

    whole = chunk_size if cached else 0
    last = keys - keys % chunk_size
    bounds = [
        (0, min(keys, whole), 1),
        (whole, last, (last - whole) // chunk_size),
        (max(whole, last), keys, 1),
    ]
    pieces = [piece(*bound) for bound in bounds if bound[0] < bound[1]]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)


def causal_chunked(
    attend: Attend,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chunk_size: Optional[int],
    cache: Optional[KeyValues] = None,
    lengths: Optional[Tensor] = None,
) -> Tuple[Tensor, KeyValues]:
    """One piece of a stream: q, k (B, n, z), v (B, n, e) after `cache` -> outputs (B, n, e), the cache after them.

    `lengths` (B,) marks right padding of this piece. Padded keys come last, where no real query looks.
    """
    new, align = q.size(1), None
    if cache is not None:
        k, v = torch.cat([cache.keys, k], 1), torch.cat([cache.values, v], 1)
    total = k.size(1)
    if cache is not None and cache.padding is not None:
        # Rows stand at different places in their chunks: put each one's keys in a row again, queries beside them.
        pads = (
            q.new_zeros((q.size(0), new), dtype=torch.bool) if lengths is None else padding_from_lengths(lengths, new)
        )
        align = Alignment.of(torch.cat([cache.padding, pads], 1), crop=True)
        q = torch.cat([q.new_zeros(q.size(0), total - new, q.size(2)), q], 1)
        q, k, v, lengths = align.front(q), align.front(k), align.front(v), align.lengths
    elif lengths is not None:
        lengths = lengths + (total - new)
    out = chunked(attend, q, k, v, chunk_size)
    if align is not None:
        out = align.back(out)[:, total - new :]
    return out, _rest(k, v, chunk_size, lengths)


def _rest(k: Tensor, v: Tensor, chunk_size: Optional[int], lengths: Optional[Tensor]) -> KeyValues:
    """The keys and values that later tokens still see, of k and v that start at a chunk border."""
    total = k.size(1)
    if lengths is None:
        start = 0 if chunk_size is None else total - total % chunk_size
        if start == 0:
            return KeyValues(k, v)
        return KeyValues(k[:, start:].clone(), v[:, start:].clone())  # a view would keep all of k and v alive
    width = min(total, total if chunk_size is None else chunk_size - 1)
    if chunk_size is None and not is_compiling():
        width = max(1, int(lengths.max()))  # pads of this piece are not kept
    start = torch.zeros_like(lengths) if chunk_size is None else lengths - lengths % chunk_size
    index = start.unsqueeze(1) + torch.arange(width, device=k.device)  # (B, width)
    padding = index >= lengths.unsqueeze(1)
    index = index.clamp_max(total - 1).unsqueeze(-1)
    gathered = (t.gather(1, index.expand(-1, -1, t.size(2))) for t in (k, v))
    return KeyValues(*(t.masked_fill(padding.unsqueeze(-1), 0.0) for t in gathered), padding)
