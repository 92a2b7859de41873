"""Linear attention to whole chunks of the past, the global part of FLASH.

    causal:         y_t = q_t M_g / (g c),  M_g = the sum of k_u (outer) v_u over the g chunks before t's; 0 in chunk 0
    bidirectional:  y_t = q_t M / n,        M over all n real tokens

Both divide by the number of keys in the sum: it is bounded, known at t, and independent of what follows. Sums are in
float32 or better. The form in chunks has the sums before all chunks at once, n / c x s x e numbers, and backward
computes them again.
"""

from typing import NamedTuple, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mega_fairseq.ops.padding import padding_from_lengths
from mega_fairseq.ops.precision import at_least_float32, without_autocast


class Memory(NamedTuple):
    """What is left of finished chunks."""

    sum: Tensor  # (B, s, e) of k (outer) v, in float32 or better
    tokens: Tensor  # (B,) in these chunks


def chunk_memory_naive(
    q: Tensor, k: Tensor, v: Tensor, chunk_size: int, memory: Memory, lengths: Tensor
) -> Tuple[Tensor, Memory]:
    """`chunk_memory` by matrices of all tokens."""
    (_, total, _), finished = k.shape, chunk_size * (lengths // chunk_size)  # tokens: (B,)
    u = torch.arange(total, device=k.device)
    t = u[total - q.size(1) :].unsqueeze(1)
    inside = u < finished.view(-1, 1, 1)  # (B, 1, m)
    seen = inside & (u < chunk_size * (t // chunk_size))  # (B, n, m)
    count = memory.tokens.view(-1, 1, 1) + seen.sum(-1, keepdim=True)
    y = (q @ memory.sum + (q @ k.transpose(1, 2) * seen) @ v) / count.clamp_min(1)
    return y * (count > 0), Memory(memory.sum + (k.transpose(1, 2) * inside) @ v, memory.tokens + finished)


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
    total, new, dtype = k.size(1), q.size(1), at_least_float32(q.dtype)
    whole, front, back = total // chunk_size, total - new, -total % chunk_size
    finished = torch.full_like(memory.tokens, whole) if lengths is None else lengths // chunk_size  # chunks: (B,)
    with without_autocast(q):
        q = (F.pad(q, (0, 0, front, back)) if front or back else q).unflatten(1, (-1, chunk_size))  # (B, K, c, s)
        k, v = (t[:, : whole * chunk_size].unflatten(1, (whole, chunk_size)) for t in (k, v))
        if lengths is not None:
            k = k.masked_fill(padding_from_lengths(finished, whole)[:, :, None, None], 0.0)
        seen = memory.tokens.unsqueeze(1) + chunk_size * torch.arange(q.size(1), device=q.device)  # tokens: (B, K)
        factor = torch.where(seen > 0, seen.clamp_min(1).to(dtype).reciprocal(), 0.0)[:, :, None, None]
        inputs = q, k, v, memory.sum.to(dtype), factor
        out, after = checkpoint(_read, *inputs, use_reentrant=False, preserve_rng_state=False)  # nothing is random
    return out.flatten(1, 2)[:, front : front + new], Memory(after, memory.tokens + finished * chunk_size)


def _read(q: Tensor, k: Tensor, v: Tensor, memory: Tensor, factor: Tensor) -> Tuple[Tensor, Tensor]:
    """q (B, K, c, s) in chunks, times a factor (B, K, 1, 1), reads the memory before its chunk: (B, K, c, e).

    Also the memory after all whole chunks k (B, F, c, s) and v (B, F, c, e).
    """
    products = k.to(memory.dtype).transpose(2, 3) @ v.to(memory.dtype)
    sums = torch.cat([memory.unsqueeze(1), products], 1).cumsum(1)
    return ((q * factor) @ sums[:, : q.size(1)]).to(v.dtype), sums[:, -1].clone()


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
