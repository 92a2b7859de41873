"""Linear attention to whole chunks of the past, the global part of FLASH.

    causal:         y_t = q_t M_g / (g c),  M_g = the sum of k_u (outer) v_u over the g chunks before t's; 0 in chunk 0
    bidirectional:  y_t = q_t M / n,        M over all n real tokens

Both divide by the number of keys in the sum: it is bounded, known at t, and independent of what follows. Sums are in
float32 or better. The form in chunks has tensors of n / c x s x e numbers and saves only its inputs for backward.
"""

from typing import NamedTuple, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mega_fairseq.ops.padding import padding_from_lengths
from mega_fairseq.ops.precision import at_least_float32, is_compiling, without_autocast
from mega_fairseq.ops.sequence_parallel import Slices, entering_sums


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
    q: Tensor, k: Tensor, v: Tensor, chunk_size: int, memory: Memory, lengths: Optional[Tensor] = None
) -> Tuple[Tensor, Memory]:
    """Queries of the last n of m places against the chunks before theirs -> (B, n, e), and the next memory.

    q (B, n, s), k (B, m, s) and v (B, m, e) start at the first place of a chunk, behind `memory`. `lengths` (B,) marks
    right padding of k and v; a chunk is finished when all its tokens are real.
    """
    with without_autocast(q):
        dtype = at_least_float32(q.dtype)
        apply = _in_chunks if is_compiling() else _ChunkMemory.apply
        out, total = apply(q, k, v, memory.sum.to(dtype), memory.tokens, lengths, chunk_size)
    whole = torch.full_like(memory.tokens, k.size(1)) if lengths is None else lengths
    return out.to(v.dtype), Memory(total, memory.tokens + (whole - whole % chunk_size))


def chunk_memory_of_slice(
    q: Tensor, k: Tensor, v: Tensor, chunk_size: int, memory: Memory, slices: Slices
) -> Tuple[Tensor, Memory]:
    """`chunk_memory` of this process's slice, where `memory` is before all slices -> out, the memory after all slices.

    The slice's own sum is one product; the state that enters is then like any other.
    """
    with without_autocast(q):
        wide_k, wide_v = (t.to(at_least_float32(t.dtype)) for t in (k, v))
        own = torch.bmm(wide_k.transpose(1, 2), wide_v)  # (B, s, e); only the last slice may have an unfinished chunk
        entering, after = entering_sums(own, slices, memory.sum)
    tokens = (memory.tokens + count * slices.width for count in (slices.before, slices.group.size))
    out, _ = chunk_memory(q, k, v, chunk_size, Memory(entering, next(tokens)))
    return out, Memory(after, next(tokens))


# ------------------------------------------------------------------------------------------- layout


def _split(q: Tensor, k: Tensor, v: Tensor, size: int, lengths: Optional[Tensor]) -> Tuple[Tensor, Tensor, Tensor]:
    """Queries (B, G, c, s) of all chunks, keys and values (B, F, c, .) of the F whole ones, zero where unfinished."""
    dtype, total = at_least_float32(q.dtype), k.size(1)
    before, whole = total - q.size(1), total // size
    q = _padded(q.to(dtype), before, -total % size).unflatten(1, (-1, size))
    k, v = (t[:, : whole * size].to(dtype).unflatten(1, (whole, size)) for t in (k, v))
    if lengths is not None:
        k = k.masked_fill(padding_from_lengths(lengths // size, whole)[:, :, None, None], 0.0)
    return q, k, v


def _padded(x: Tensor, before: int, after: int) -> Tensor:
    """Zeros around the places of x (B, n, .); `F.pad` would copy it even without any."""
    return F.pad(x, (0, 0, before, after)) if before or after else x


def _sums(k: Tensor, v: Tensor, memory: Tensor) -> Tensor:
    """The memory before each chunk, and after the last whole one: (B, F + 1, s, e)."""
    return torch.cat([memory.unsqueeze(1), k.transpose(2, 3) @ v], 1).cumsum_(1)


def _one_over(tokens: Tensor, chunks: int, size: int, dtype: torch.dtype) -> Tensor:
    """1 / the number of tokens before each chunk, 0 for the first: (B, G, 1, 1)."""
    seen = tokens.unsqueeze(1) + size * torch.arange(chunks, device=tokens.device)
    return torch.where(seen > 0, seen.clamp_min(1).to(dtype).reciprocal(), 0.0)[:, :, None, None]


def _in_chunks(
    q: Tensor, k: Tensor, v: Tensor, memory: Tensor, tokens: Tensor, lengths: Optional[Tensor], size: int
) -> Tuple[Tensor, Tensor]:
    new = q.size(1)
    before = k.size(1) - new
    q, k, v = _split(q, k, v, size, lengths)
    sums = _sums(k, v, memory)
    out = (q * _one_over(tokens, q.size(1), size, q.dtype)) @ sums[:, : q.size(1)]  # (B, G, c, e)
    return out.flatten(1, 2)[:, before : before + new], sums[:, -1].clone()  # a view would keep all sums alive


class _ChunkMemory(torch.autograd.Function):
    """`_in_chunks`, whose backward computes the sums again."""

    @staticmethod
    def forward(ctx, q, k, v, memory, tokens, lengths, size):
        ctx.save_for_backward(q, k, v, memory, tokens, lengths)
        ctx.size = size
        return _in_chunks(q, k, v, memory, tokens, lengths, size)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout, dmemory):
        q, k, v, memory, tokens, lengths = ctx.saved_tensors
        size, new = ctx.size, q.size(1)
        before, whole = k.size(1) - new, k.size(1) // size
        with without_autocast(q):
            queries, keys, values = _split(q, k, v, size, lengths)
            chunks = queries.size(1)
            factor = _one_over(tokens, chunks, size, queries.dtype)
            dout = _padded(dout.to(queries.dtype), before, -k.size(1) % size).unflatten(1, (chunks, size))
            dq = (dout @ _sums(keys, values, memory)[:, :chunks].transpose(2, 3)).mul_(factor)  # (B, G, c, s)
            # The gradient of each prefix sum, then of each product: that of all later chunks and the memory.
            dsums = (queries * factor).transpose(2, 3) @ dout  # (B, G, s, e)
            if whole == chunks:  # no queries after the last whole chunk
                dsums = F.pad(dsums, (0, 0, 0, 0, 0, 1))
            dsums[:, -1] += dmemory
            dsums = dsums.flip(1).cumsum_(1)  # (B, F + 1, s, e), the last one first
            dfirst, dproducts = dsums[:, -1].clone(), dsums[:, :-1].flip(1)
            del dsums
            dk, dv = values @ dproducts.transpose(2, 3), keys @ dproducts
            if lengths is not None:
                unfinished = padding_from_lengths(lengths // size, whole)[:, :, None, None]
                dk, dv = dk.masked_fill(unfinished, 0.0), dv.masked_fill(unfinished, 0.0)
            rest = k.size(1) - whole * size
            dk, dv = (_padded(t.flatten(1, 2), 0, rest) for t in (dk, dv))
        dq = dq.flatten(1, 2)[:, before : before + new]
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dfirst, None, None, None


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
