"""Linear attention to whole chunks of the past, the global part of FLASH.

    causal:         y_t = q_t M_g / (g c),  M_g = the sum of k_u (outer) v_u over the g chunks before t's; 0 in chunk 0
    bidirectional:  y_t = q_t M / n,        M over all n real tokens

Both divide by the number of keys in the sum: it is bounded, known at t, and independent of what follows. Sums are in
float32 or better. The form in chunks saves only its inputs for backward. On the CPU it has one memory at a time, on
GPUs those of all chunks, n / c x s x e numbers.
"""

from typing import Any, Iterator, List, NamedTuple, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mega_fairseq.ops.operators import operator
from mega_fairseq.ops.padding import padding_from_lengths
from mega_fairseq.ops.precision import at_least_float32, without_autocast

TILE_TOKENS = 256  # of a row: on the CPU, their products with the memory are one tile


class Memory(NamedTuple):
    """What is left of finished chunks."""

    sum: Tensor  # (B, s, e) of k (outer) v, in float32 or better
    tokens: Tensor  # (B,) in these chunks


def chunk_memory_naive(
    q: Tensor, k: Tensor, v: Tensor, chunk_size: int, memory: Memory, lengths: Tensor
) -> Tuple[Tensor, Memory]:
    """`chunk_memory`, token by token."""
    batch, total = k.shape[:2]
    first, rows, sums, tokens = total - q.size(1), [], [], []
    for b in range(batch):
        running, finished, outputs = memory.sum[b], memory.tokens[b], []
        for t in range(total):
            if t % chunk_size == 0 and 0 < t <= int(lengths[b]):
                chunk = slice(t - chunk_size, t)
                running, finished = running + k[b, chunk].t() @ v[b, chunk], finished + chunk_size
            if t >= first:
                outputs.append(q[b, t - first] @ running / finished if finished > 0 else torch.zeros_like(v[b, t]))
        if total % chunk_size == 0 and total <= int(lengths[b]):
            chunk = slice(total - chunk_size, total)
            running, finished = running + k[b, chunk].t() @ v[b, chunk], finished + chunk_size
        rows.append(torch.stack(outputs))
        sums.append(running)
        tokens.append(finished)
    return torch.stack(rows), Memory(torch.stack(sums), torch.stack(tokens))


def chunk_memory(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chunk_size: int,
    memory: Memory,
    lengths: Optional[Tensor] = None,
) -> Tuple[Tensor, Memory]:
    """Queries of the last n of m places against the chunks before theirs -> (B, n, e), and the next memory.

    q (B, n, s), k (B, m, s) and v (B, m, e) start at the first place of a chunk, behind `memory`. `lengths` (B,) marks
    right padding of k and v; a chunk is finished when all its tokens are real.
    """
    with without_autocast(q):
        start = memory.sum.to(at_least_float32(q.dtype))
        out, total = _chunk_memory(q, k, v, start, memory.tokens, lengths, chunk_size)
    whole = torch.full_like(memory.tokens, k.size(1)) if lengths is None else lengths
    return out, Memory(total, memory.tokens + (whole - whole % chunk_size))


# ------------------------------------------------------------------------------------------- layout


def _split(q: Tensor, k: Tensor, v: Tensor, size: int, lengths: Optional[Tensor]) -> Tuple[Tensor, Tensor, Tensor]:
    """Queries (B, G, c, s) of all chunks, keys and values (B, F, c, .) of the F whole ones, zero where unfinished."""
    total = k.size(1)
    before, whole = total - q.size(1), total // size
    q = _padded(q, before, -total % size).unflatten(1, (-1, size))
    k, v = (t[:, : whole * size].unflatten(1, (whole, size)) for t in (k, v))
    if lengths is not None:
        k = k.masked_fill(_unfinished(lengths, whole, size), 0.0)
    return q, k, v


def _padded(x: Tensor, before: int, after: int) -> Tensor:
    """Zeros around the places of x (B, n, .); `F.pad` would copy it even without any."""
    return F.pad(x, (0, 0, before, after)) if before or after else x


def _unfinished(lengths: Tensor, chunks: int, size: int) -> Tensor:
    return padding_from_lengths(lengths // size, chunks)[:, :, None, None]


def _one_over(tokens: Tensor, chunks: int, size: int, dtype: torch.dtype) -> Tensor:
    """1 / the number of tokens before each chunk, 0 for the first: (B, G, 1, 1)."""
    seen = tokens.unsqueeze(1) + size * torch.arange(chunks, device=tokens.device)
    return torch.where(seen > 0, seen.clamp_min(1).to(dtype).reciprocal(), 0.0)[:, :, None, None]


def _tiles(q: Tensor) -> List[Tuple[slice, slice]]:
    """Rows and chunks that are computed together: everything, or what fits into the cache on the CPU."""
    rows, chunks, size, _ = q.shape
    if q.device.type != "cpu":
        return [(slice(0, rows), slice(0, chunks))]
    together = max(1, TILE_TOKENS // size)
    return [
        (slice(b, b + 1), slice(g, min(g + together, chunks))) for b in range(rows) for g in range(0, chunks, together)
    ]


def _memories(q: Tensor, k: Tensor, v: Tensor, running: Tensor) -> Iterator[Tuple[slice, slice, Tensor]]:
    """Each tile with the memory before each of its chunks, and after its last whole one: (R, F + 1, s, e).

    `running` (B, s, e) goes along, and is the memory after everything in the end.
    """
    for rows, chunks in _tiles(q):
        keys, values = (t[rows, chunks].to(running.dtype) for t in (k, v))
        sums = torch.cat([running[rows].unsqueeze(1), keys.transpose(2, 3) @ values], 1).cumsum_(1)
        running[rows] = sums[:, -1]
        yield rows, chunks, sums


def _after_each(dsums: Tensor, dafter: Tensor) -> Tensor:
    """The gradients of all memories that contain a chunk's product, for each chunk: (R, G, s, e)."""
    if dsums.size(1) == 1:
        return dafter.unsqueeze(1)
    return torch.cat([dsums[:, 1:], dafter.unsqueeze(1)], 1).flip(1).cumsum_(1).flip(1)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, memory: Tensor, tokens: Tensor, lengths: Optional[Tensor], size: int
) -> Tuple[Tensor, Tensor]:
    new, dtype = q.size(1), memory.dtype
    before = k.size(1) - new
    q, k, v = _split(q, k, v, size, lengths)
    factor = _one_over(tokens, q.size(1), size, dtype)
    out, running = v.new_empty(*q.shape[:3], v.size(-1)), memory.clone()
    for rows, chunks, sums in _memories(q, k, v, running):
        queries = q[rows, chunks] * factor[rows, chunks]
        out[rows, chunks] = (queries @ sums[:, : queries.size(1)]).to(out.dtype)  # (R, G, c, e)
    return out.flatten(1, 2)[:, before : before + new].contiguous(), running


def _fake(q: Tensor, k: Tensor, v: Tensor, memory: Tensor, *_: Any) -> Tuple[Tensor, Tensor]:
    return v.new_empty(v.size(0), q.size(1), v.size(2)), torch.empty_like(memory)


def _backward(grads, _, q, k, v, memory, tokens, lengths, size) -> List[Tensor]:
    """All sums are computed again."""
    new, total, dtype = q.size(1), k.size(1), memory.dtype
    before, whole = total - new, total // size
    dout, dmemory = grads
    dout = v.new_zeros(v.size(0), new, v.size(2)) if dout is None else dout
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    queries, keys, values = _split(q, k, v, size, lengths)
    padded = _padded(dout, before, -total % size).unflatten(1, (-1, size))
    factor = _one_over(tokens, queries.size(1), size, dtype)
    dqueries = torch.empty_like(queries)
    for rows, chunks, sums in _memories(queries, keys, values, memory.clone()):
        grad = padded[rows, chunks].to(dtype)
        dqueries[rows, chunks] = (grad @ sums[:, : grad.size(1)].transpose(2, 3)).mul_(factor[rows, chunks])
    # The gradient of each chunk's sums, then of its product: that of all later sums.
    dkeys, dvalues = (t[:, : whole * size].unflatten(1, (whole, size)) for t in (dk, dv))
    dafter = torch.zeros_like(memory) if dmemory is None else dmemory.clone()
    for rows, chunks in reversed(_tiles(queries)):
        dsums = (queries[rows, chunks] * factor[rows, chunks]).transpose(2, 3) @ padded[rows, chunks].to(dtype)
        dproducts = _after_each(dsums, dafter[rows])
        finished = slice(chunks.start, min(chunks.stop, whole))
        some = dproducts[:, : finished.stop - finished.start]
        dkeys[rows, finished] = values[rows, finished].to(dtype) @ some.transpose(2, 3)
        dvalues[rows, finished] = keys[rows, finished].to(dtype) @ some
        dafter[rows] = dproducts[:, 0] + dsums[:, 0]
    for t, chunks in ((dk, dkeys), (dv, dvalues)):
        t[:, whole * size :] = 0.0
        if lengths is not None:
            chunks.masked_fill_(_unfinished(lengths, whole, size), 0.0)
    return [dqueries.flatten(1, 2)[:, before : before + new], dk, dv, dafter]


# Autograd would keep the memories of all chunks, n / c x s x e numbers.
_chunk_memory = operator(
    "chunk_memory",
    "Tensor q, Tensor k, Tensor v, Tensor memory, Tensor tokens, Tensor? lengths, int size",
    "(Tensor, Tensor)",
    _forward,
    _fake,
    _backward,
    saved=slice(0),
)


# ------------------------------------------------------------------------------------------- bidirectional


def whole_memory(q: Tensor, k: Tensor, v: Tensor, padding: Optional[Tensor] = None) -> Tensor:
    """q (B, n, s) against the sum over all real tokens, divided by their number: (B, n, e). `padding` is (B, n)."""
    dtype = at_least_float32(q.dtype)
    with without_autocast(q):
        wide_q, wide_k, wide_v = (t.to(dtype) for t in (q, k, v))
        tokens = k.size(1)
        if padding is not None:
            wide_k = wide_k.masked_fill(padding.unsqueeze(-1), 0.0)
            tokens = (~padding).sum(1).clamp_min(1).to(dtype).view(-1, 1, 1)
        memory = torch.bmm(wide_k.transpose(1, 2), wide_v) / tokens  # (B, s, e)
        return torch.bmm(wide_q, memory).to(v.dtype)
