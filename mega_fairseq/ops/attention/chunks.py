"""Attention inside chunks, for any length, from any carried state (paper, section 3.3: Mega-chunk).

A causal stack is a recurrent model: it must remember the keys and values of an unfinished chunk, in `KeyValues`.
Any split of a sequence gives the same outputs, because every piece first completes the chunk that the previous
piece left unfinished.
"""

from typing import Callable, NamedTuple, Optional, Tuple, Union

import torch
from torch import Tensor

from mega_fairseq.ops.padding import Alignment, padding_from_lengths

MIN_SPARE = 8  # minimum spare capacity of a new buffer, in tokens; small, since every row allocates it

# (queries, keys, values, key padding) of whole groups -> outputs; if causal, the last query is at the last key
Attend = Callable[[Tensor, Tensor, Tensor, Optional[Tensor]], Tensor]
Place = Union[int, Tensor]  # in a chunk; (B, 1) if rows are at different places


def _may_reuse() -> bool:
    """Whether states may share storage and change in place: not with gradients, nor in a graph of the compiler."""
    return not (torch.is_grad_enabled() or torch.compiler.is_compiling())


def writable(tensor: Tensor) -> bool:
    """Whether torch allows changes in place: those of inference mode are only allowed in it."""
    return torch.is_inference_mode_enabled() or not tensor.is_inference()


class Buffer:
    """Storage with spare capacity for keys and values. Of the states that share it, only the longest can append."""

    def __init__(self, rows: int, keys: Tensor, values: Tensor, capacity: int):
        self.keys, self.values = (t.new_empty(rows, capacity, t.size(2)) for t in (keys, values))
        self.used = 0

    def holds(self, keys: Tensor, values: Tensor) -> bool:
        """Whether these are everything in this buffer: not a copy, not a selection of rows, not an older state."""
        if not writable(self.keys):
            return False
        stored = ((keys, self.keys), (values, self.values))  # either may have no width, and then no storage
        here = all(t.data_ptr() == own.data_ptr() for t, own in stored)
        return here and keys.size(0) == self.keys.size(0) and keys.size(1) == self.used

    def append(self, keys: Tensor, values: Tensor) -> Tuple[Tensor, Tensor]:
        start, self.used = self.used, self.used + keys.size(1)
        self.keys[:, start : self.used] = keys
        self.values[:, start : self.used] = values
        return self.keys[:, : self.used], self.values[:, : self.used]

    def fill(self, keys: Tensor, values: Tensor, order: Tensor) -> Tuple[Tensor, Tensor]:
        """Fills the empty buffer with these rows."""
        self.used = keys.size(1)
        of_keys, of_values = self.keys[:, : self.used], self.values[:, : self.used]
        return torch.index_select(keys, 0, order, out=of_keys), torch.index_select(values, 0, order, out=of_values)


class KeyValues(NamedTuple):
    """The keys and values of the unfinished chunk, or all of them if attention is not chunked."""

    keys: Tensor  # (B, m, z)
    values: Tensor  # (B, m, e)
    padding: Optional[Tensor] = None  # (B, m) bool, True = unused; only if rows are at different positions
    buffer: Optional[Buffer] = None  # the storage of keys and values, if more tokens can be appended in place

    @property
    def place(self) -> Place:
        """The place of the next token, which is the number of tokens here."""
        return self.keys.size(1) if self.padding is None else (~self.padding).sum(1, keepdim=True)

    @property
    def last(self) -> int:
        """The place of the newest token, if rows are at the same position."""
        return self.keys.size(1) - 1

    def append(self, keys: Tensor, values: Tensor, chunk_size: Optional[int]) -> "KeyValues":
        """Appends n tokens: (B, m + n, .). Without gradients, old tokens are copied only when a buffer is full."""
        buffer, total = self.buffer, self.keys.size(1) + keys.size(1)
        temporary = self.padding is not None or (chunk_size is not None and total >= chunk_size)  # not the next state
        if temporary or not _may_reuse():
            return KeyValues(torch.cat([self.keys, keys], 1), torch.cat([self.values, values], 1), self.padding)
        if buffer is None or not buffer.holds(self.keys, self.values) or buffer.keys.size(1) < total:
            capacity = total + max(MIN_SPARE, total // 2)  # grows geometrically, so that copies are rare
            capacity = capacity if chunk_size is None else min(capacity, chunk_size)
            buffer = Buffer(keys.size(0), keys, values, capacity)
            buffer.append(self.keys, self.values)
        return KeyValues(*buffer.append(keys, values), None, buffer)

    def unless_complete(self, chunk_size: Optional[int]) -> "KeyValues":
        """Itself, or without any tokens if its chunk is complete, since later tokens do not attend to it."""
        if self.keys.size(1) != chunk_size:
            return self
        return KeyValues(*(t.new_empty(t.size(0), 0, t.size(2)) for t in (self.keys, self.values)))

    def select(self, order: Tensor) -> "KeyValues":
        """Replaces row i by row order[i]."""
        if self.buffer is not None and _may_reuse():
            buffer = Buffer(len(order), self.keys, self.values, self.buffer.keys.size(1))
            return KeyValues(*buffer.fill(self.keys, self.values, order), None, buffer)
        chosen = KeyValues(*(None if t is None else t.index_select(0, order) for t in self[:3]))
        if chosen.padding is None or not _may_reuse():
            return chosen
        counts = chosen.place
        if not bool((counts == counts[:1]).all()):
            return chosen
        used = int(counts[0])  # all rows are at one position, such as after beams that all continue one
        return KeyValues(chosen.keys[:, :used], chosen.values[:, :used])

    def follow(self, order: Tensor, last: int) -> "KeyValues":
        """Like `select`, in place, if each row and its replacement differ only in their `last` tokens."""
        if self.padding is not None or self.keys.requires_grad or not writable(self.keys):
            return self.select(order)
        first = max(0, self.keys.size(1) - last)
        for tensor in (self.keys[:, first:], self.values[:, first:]):
            tensor.copy_(tensor.index_select(0, order))
        return self


def chunked(
    attend: Attend,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chunk_size: Optional[int],
    padding: Optional[Tensor] = None,
) -> Tensor:
    """q (B, n, z) against k (B, m + n, z) and v (B, m + n, e), m < chunk_size keys before the first query -> (B, n, e).

    The unfinished chunk, the whole chunks and the remainder are separate calls of `attend`, without padding to a chunk.
    """
    if chunk_size is None:
        return attend(q, k, v, padding)
    batch, keys = k.shape[:2]
    cached = keys - q.size(1)

    whole = chunk_size if cached else 0
    last = keys - keys % chunk_size
    bounds = [
        (0, min(keys, whole), 1),
        (whole, last, (last - whole) // chunk_size),
        (max(whole, last), keys, 1),
    ]
    pieces = []
    for start, stop, count in bounds:
        if start >= stop:
            continue
        first = max(0, start - cached)  # query
        inputs = (q[:, first : stop - cached], *(None if t is None else t[:, start:stop] for t in (k, v, padding)))
        out = attend(*(None if t is None else _groups(t, count) for t in inputs))
        pieces.append(out.reshape(batch, stop - cached - first, out.size(-1)))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)


def _groups(t: Tensor, count: int) -> Tensor:
    """(B, K c, ...) -> (B K, c, ...) for K chunks."""
    return t.reshape(t.size(0) * count, t.size(1) // count, *t.shape[2:])


class Joined(NamedTuple):
    """A piece of a sequence behind the unfinished chunk that it continues; index 0 is the first place of a chunk."""

    q: Tensor  # (B, n, z), or (B, m + n, z) if rows were aligned
    k: Tensor  # (B, m + n, z)
    v: Tensor  # (B, m + n, e)
    new: int  # n, the tokens of the piece
    lengths: Optional[Tensor]  # (B,) real tokens in k and v, if there are pads; real tokens come first
    align: Optional[Alignment]  # if rows were at different places in their chunks
    buffer: Optional[Buffer]

    def outputs(self, out: Tensor) -> Tensor:
        """Outputs for every row of q, in the order of the piece: (B, n, e)."""
        return out if self.align is None else self.align.back(out)[:, -self.new :]

    def rest(self, chunk_size: Optional[int]) -> KeyValues:
        """The keys and values that later tokens still see."""
        return unfinished_chunk(self.k, self.v, chunk_size, self.lengths, self.buffer)


def join(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chunk_size: Optional[int],
    cache: Optional[KeyValues] = None,
    lengths: Optional[Tensor] = None,
) -> Joined:
    """Puts the queries, keys and values of a piece (B, n, .) behind `cache`.

    `lengths` (B,) marks its right padding: padded keys come last, where no real query sees them.
    """
    new, padding, buffer = q.size(1), None, None
    if cache is not None:
        k, v, padding, buffer = cache.append(k, v, chunk_size)
    total = k.size(1)
    if padding is None:
        return Joined(q, k, v, new, None if lengths is None else lengths + (total - new), None, buffer)
    # Rows are at different places in their chunks: align each row's keys, and its queries with them.
    pads = q.new_zeros((q.size(0), new), dtype=torch.bool) if lengths is None else padding_from_lengths(lengths, new)
    align = Alignment.of(torch.cat([padding, pads], 1), crop=True)
    q = torch.cat([q.new_zeros(q.size(0), total - new, q.size(2)), q], 1)
    q, k, v = (align.front(t) for t in (q, k, v))
    return Joined(q, k, v, new, align.lengths, align, None)


def unfinished_chunk(
    k: Tensor, v: Tensor, chunk_size: Optional[int], lengths: Optional[Tensor], buffer: Optional[Buffer]
) -> KeyValues:
    """The keys and values that later tokens still see, from k and v that start at a chunk border."""
    total = k.size(1)
    if lengths is None:
        start = 0 if chunk_size is None else total - total % chunk_size
        if start == 0:
            return KeyValues(k, v, None, buffer)
        return KeyValues(k[:, start:].clone(), v[:, start:].clone())  # a view would keep all of k and v alive
    width = total if chunk_size is None else min(total, chunk_size - 1)
    start = torch.zeros_like(lengths) if chunk_size is None else lengths - lengths % chunk_size
    index = start.unsqueeze(1) + torch.arange(width, device=k.device)  # (B, width)
    padding = index >= lengths.unsqueeze(1)
    index = index.clamp_max(total - 1).unsqueeze(-1)
    gathered = (t.gather(1, index.expand(-1, -1, t.size(2))) for t in (k, v))
    return KeyValues(*(t.masked_fill(padding.unsqueeze(-1), 0.0) for t in gathered), padding)
