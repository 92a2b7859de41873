"""Decoding steps as CUDA graphs.

A step of a few rows has hundreds of small kernels, which a GPU runs several times as fast as Python launches them. A
`StepGraph` is one captured step: it reads tokens, the state and positions from storage of a fixed size, and writes the
next state there. A `GraphState` takes the place of `DecoderState` in fairseq's incremental state; it uses a graph for
as long as the state fits, and moves to a larger one when the storage is full, or to a smaller one when rows are gone.

What a graph cannot contain runs as before: prefixes, rows at different positions, dropout, mixers without `fixed_step`.
"""

import logging
import weakref
from functools import partial
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Set, Tuple

import torch
from torch import Tensor

from mega_fairseq.acceleration.cuda_graph import Capture, capture_on, try_capture
from mega_fairseq.modules import BlockState, CrossAttentionState
from mega_fairseq.modules.decoder_state import DecoderState, PackedWeights
from mega_fairseq.modules.finite import DIVERGED, are_finite, check_numbers
from mega_fairseq.modules.projection import has_hooks
from mega_fairseq.ops.attention.chunks import KeyValues
from mega_fairseq.ops.attention.fixed import FixedKeyValues, FixedPlace
from mega_fairseq.ops.attention.segments import Segments

logger = logging.getLogger(__name__)

FIRST_CAPACITY = 64  # tokens
SHORTEST_SOURCE = 16  # tokens
MOST_GRAPHS = 16  # of one model
STEPS_BETWEEN_CHECKS = 8


class CaptureFailed(Exception):
    """A step cannot be captured on this GPU."""


class Size(NamedTuple):
    """The capacity of a graph."""

    rows: int
    sources: int  # 0 without cross attention
    source_length: int
    tokens: int


def rounded(count: int) -> int:
    """The next of the sizes 1, 2, 4, 8, 12, 16, 24, 32, 48, ..., so that there are few graphs."""
    size = 1 << max(0, count - 1).bit_length()
    return size * 3 // 4 if size >= 16 and count <= size * 3 // 4 else size


def tensors_of(part: Any, caches: bool = True) -> Iterator[Tensor]:
    """The tensors of a state with one row for each sequence; those of a cache without the number of its tokens."""
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, (KeyValues, FixedKeyValues)):
        yield from part[:2] if caches else ()
    elif isinstance(part, BlockState):
        yield from tensors_of((part.mixer, part.feed_forward), caches)
    elif isinstance(part, tuple):
        for field in part:
            yield from tensors_of(field, caches)


class StepGraph:
    """One step of a decoder for states of this size, captured with storage of its own."""

    def __init__(
        self, decoder: Any, packed: PackedWeights, blocks: Tuple[BlockState, ...], size: Size, capture: Capture
    ):
        self.decoder, self.packed, self.size, self.capture = decoder, packed, size, capture
        self.user: Callable[[], Optional[GraphState]] = _nobody
        self.search: Any = None  # a search around this step, captured by its owner
        device = next(tensors_of(blocks)).device
        self.tokens = torch.full((size.rows, 1), decoder.dictionary.eos(), device=device)
        self.rows = torch.arange(size.rows, device=device)
        self.order = self.rows.clone()  # the row that each row continues
        self.places: Dict[Optional[int], FixedPlace] = {}  # by chunk size
        self.padding = self.rows.new_ones((size.sources, size.source_length), dtype=torch.bool)  # of all sources
        self.segments: Optional[Segments] = None
        if decoder.separators is not None:
            shapes = ((size.rows, 1, 2), (size.sources, size.source_length, 2))
            self.segments = Segments(*(self.rows.new_zeros(shape, dtype=torch.int32) for shape in shapes))
        self.blocks = tuple(map(self._storage, decoder.blocks, blocks))
        self.scores: Optional[Tensor] = None  # (R, V) of the next tokens
        (self.replay,) = capture([self._step])

    def place(self, chunk_size: Optional[int]) -> FixedPlace:
        """The position of the next token, in its chunk of this size."""
        limit = min(self.size.tokens, chunk_size or self.size.tokens)
        rows = self.rows.unsqueeze(1).repeat(1, limit)
        return self.places.setdefault(chunk_size, FixedPlace(self.rows.new_zeros(()), limit, rows))

    def _storage(self, layer: Any, like: BlockState) -> BlockState:
        chunk_size = getattr(layer.mixer.config, "chunk_size", None)

        def empty(tensor: Tensor) -> Tensor:
            return tensor.new_zeros(self.size.rows, *tensor.shape[1:])

        def empty_cache(cache: KeyValues) -> FixedKeyValues:
            place = self.place(chunk_size)
            return FixedKeyValues(*(t.new_zeros(self.size.rows, place.limit, t.size(2)) for t in cache[:2]), place)

        cross = like.cross
        if cross is not None:
            shape = self.padding.shape
            both = (t.new_zeros(*shape, t.size(2)) for t in cross[:2])
            cross = CrossAttentionState(*both, self.padding, self.place(None))
        return like.replaced(empty, empty_cache, cross)

    def _step(self) -> None:
        if self.size.sources:  # cross attention reads the source of a row's place
            beams = self.size.rows // self.size.sources
            torch._assert_async(self.order.div(beams, rounding_mode="floor").eq(self.rows // beams).all())
        for place in self.places.values():
            place.advance_rows(self.order, self.rows)
        ordered = (lambda t: t.index_select(0, self.order)), (lambda cache: cache)  # rows of a cache stay in place
        blocks = tuple(block.replaced(*ordered, block.cross) for block in self.blocks)
        segments = None
        if self.segments is not None:
            segments = self.decoder.segments(self.tokens, self.segments.select(self.order, None))
            self.segments.queries.copy_(segments.queries)
        x = self.decoder.embed(self.tokens)
        x, after, _ = self.decoder.run(x, blocks, self.packed, segments=segments, drop=False)
        stored, new = (list(tensors_of(state, caches=False)) for state in (self.blocks, after))
        if stored:
            torch._foreach_copy_(stored, new)
        self.order.copy_(self.rows)
        for chunk_size, place in self.places.items():
            place.number.add_(1)
            if chunk_size is not None:
                place.number.remainder_(chunk_size)
        self.scores = self.packed.output(x.squeeze(1))

    def load(self, blocks: Tuple[BlockState, ...], length: int, segments: Optional[Segments]) -> None:
        """Copies the state of the first rows after `length` tokens into the storage."""
        if segments is not None:
            queries, keys = segments
            self.segments.queries.copy_(queries[:1])  # before the first token, there is one for all rows
            self.segments.queries[: len(queries)] = queries
            self.segments.keys.zero_()
            self.segments.keys[: keys.size(0), : keys.size(1)] = keys
        if not length:
            torch._foreach_zero_(list(tensors_of(self.blocks)))
        for storage, block in zip(self.blocks, blocks):
            for t, new in zip(tensors_of(storage), tensors_of(block)):
                t[tuple(map(slice, new.shape))] = new
            if storage.cross is not None:
                keys, values, padding = block.cross[:3]
                part = tuple(map(slice, keys.shape[:2]))
                storage.cross.keys[part], storage.cross.values[part] = keys, values
        if blocks[0].cross is not None:  # the layers share it
            self.padding.fill_(True)
            self.padding[part].copy_(self.padding.new_zeros(()) if padding is None else padding)
        for chunk_size, place in self.places.items():
            place.number.fill_(length % chunk_size if chunk_size else length)
            place.rows.copy_(self.rows.unsqueeze(1).expand_as(place.rows))
        self.order.copy_(self.rows)

    def unload(
        self, slots: Tensor, sentences: Tensor, length: int
    ) -> Tuple[Tuple[BlockState, ...], Optional[Segments]]:
        """The state of these rows and sources after `length` tokens: copies."""
        order = self.order.index_select(0, slots)

        def rows(tensor: Tensor) -> Tensor:
            return tensor.index_select(0, order)

        def rows_of_cache(cache: FixedKeyValues) -> KeyValues:
            chunk_size = next(size for size, place in self.places.items() if place is cache.last)
            count = length % chunk_size if chunk_size else length
            return KeyValues(*(rows(t[:, :count]) for t in cache.of_rows()))

        def block(storage: BlockState) -> BlockState:
            cross = storage.cross
            if cross is not None:
                cross = CrossAttentionState(*(t.index_select(0, sentences) for t in cross[:3]), length)
            return storage.replaced(rows, rows_of_cache, cross)

        segments = None if self.segments is None else self.segments.select(order, sentences)
        return tuple(map(block, self.blocks)), segments


class GraphState:
    """The state of a decoder in the storage of a graph; copies and pickles of it are `DecoderState`s."""

    def __init__(
        self,
        graphs: "StepGraphs",
        decoder: Any,
        packed: PackedWeights,
        state: DecoderState,
        rows: Optional[int] = None,  # before the first token, when the state has none
    ):
        self.graphs, self.decoder, self.packed = graphs, decoder, packed
        self.longest = decoder.longest
        # Of all layers; None if a layer, or cross attention, counts all tokens.
        self.chunk_sizes = {getattr(layer.mixer.config, "chunk_size", None) for layer in decoder.layers}
        if state.blocks[0].cross is not None:
            self.chunk_sizes.add(None)
        self.checked = False
        self._enter(state, rows)

    def _enter(self, state: DecoderState, rows: Optional[int] = None) -> None:
        rows = next(tensors_of(state.blocks)).size(0) if rows is None else rows
        cross, self.length = state.blocks[0].cross, state.length
        sources = 0 if cross is None else cross.keys.size(0)
        self.beams = rows // sources if sources else 1
        size = Size(
            self.beams * rounded(sources or rows),
            rounded(sources) if sources else 0,
            0 if cross is None else max(SHORTEST_SOURCE, rounded(cross.keys.size(1))),
            self._capacity(),
        )
        self.graph = self.graphs.get(self, state.blocks, size)
        self.graph.load(state.blocks, self.length, state.segments)
        self.moved = False  # whether rows have an order to follow at the next step
        self.slots = self.graph.rows[:rows]  # the row of the storage that each row is in

    def _capacity(self) -> int:
        """The number of tokens that a graph for the next token stores: a power of two, or a limit."""
        needed = max(1 + (self.length % size if size else self.length) for size in self.chunk_sizes)
        most = self.longest if None in self.chunk_sizes else max(self.chunk_sizes)
        capacity = max(FIRST_CAPACITY, 1 << (needed - 1).bit_length())
        return capacity if most is None else min(capacity, most)

    def ensure_capacity(self) -> None:
        """Moves to another graph if the storage is full, or if so few rows remain that a smaller one does."""
        if self._capacity() > self.graph.size.tokens or 2 * len(self.slots) <= self.graph.size.rows:
            self._enter(self.eager())

    def step(self, tokens: Tensor) -> Tensor:
        """The tokens of all rows (R, 1) -> scores (R, V) of the next ones.

        Pads are tokens like others here: searches only give them to rows of probability zero.
        """
        self.graph.tokens.index_copy_(0, self.slots, tokens)
        self.advance()
        self.moved = False
        scores = self.graph.scores.index_select(0, self.slots)
        self.graphs.add(scores)
        return scores

    def check(self) -> None:
        """Raises an error if scores are not finite; waits for the GPU, but not at each step."""
        if not self.checked or self.length % STEPS_BETWEEN_CHECKS == 0:
            self.graphs.check()
        self.checked = True

    def advance(self) -> None:
        """A step after the tokens and in the order that are in the storage of the graph."""
        self.graph.replay()
        self.length += 1
        self.moved = True  # the search may write to the storage, too

    def reorder(self, order: Tensor, alike: bool = True) -> "GraphState":
        """Replaces row i by row order[i]; sentences keep their order and their rows, as in fairseq's searches."""
        continued = self.slots.index_select(0, order)
        if self.moved:
            continued = self.graph.order.index_select(0, continued)
        if len(order) != len(self.slots) and self.graph.size.sources:
            sentence = torch.div(order, self.beams, rounding_mode="floor").view(-1, self.beams)
            torch._assert_async(sentence.eq(sentence[:, :1]).all() & sentence[:, 0].diff().gt(0).all())
            self.slots = self.slots.view(-1, self.beams).index_select(0, sentence[:, 0]).flatten()
        elif len(order) != len(self.slots):
            self.slots = self.graph.rows[: len(order)]
        self.graph.order.index_copy_(0, self.slots, continued)
        self.moved = True
        return self

    def eager(self) -> DecoderState:
        sentences = torch.div(self.slots[:: self.beams], self.beams, rounding_mode="floor")
        blocks, segments = self.graph.unload(self.slots, sentences, self.length)
        return DecoderState(blocks, self.length, packed=self.packed, segments=segments)

    def __deepcopy__(self, memo: Dict) -> DecoderState:
        return self.eager()

    def __reduce__(self) -> Tuple:
        return self.eager().__reduce__()


class StepGraphs:
    """The graphs of one decoder."""

    def __init__(self):
        self.graphs: List[StepGraph] = []  # the last one used is last
        self.logged: Set[str] = set()
        self.failure: Optional[str] = None  # why a step could not be captured
        self.sum: Optional[Tensor] = None  # of the scores since the last check

    def add(self, scores: Tensor) -> None:
        """Takes note of numbers that are not finite, without waiting for the GPU: fairseq's search ignores them."""
        total = scores.sum(dtype=torch.float32)
        self.sum = total if self.sum is None else self.sum + total

    def check(self) -> None:
        """Raises an error if the scores of a step since the last check are not finite; waits for the GPU."""
        total, self.sum = self.sum, None
        if total is not None:
            check_numbers(total)

    def end(self) -> None:
        """Called when a search has ended and its state is deleted, where an error could not be raised.

        The next search, or the generator of our tasks, raises it.
        """
        if self.sum is not None and not are_finite(self.sum):
            logger.error(DIVERGED)

    def step(self, decoder: Any, tokens: Tensor, state: Any) -> Tuple[Optional[Tensor], Any]:
        """The scores (R, V) after one more token of each row, or None if no graph can compute them; the next state.

        `tokens` are all so far, or only the newest one of each row.
        """
        if state is None or tokens.size(1) > max(1, state.length + 1):
            return None, state
        ready = self.ready(decoder, state, tokens.device)
        return (None, state) if ready is None else (ready.step(tokens[:, -1:]), ready)

    def ready(self, decoder: Any, state: Any, device: torch.device) -> Optional[GraphState]:
        """The state in a graph that can store the next token, or None: then the step runs without one."""
        if capture_on(device) is None or torch.is_grad_enabled():
            return None
        if isinstance(state, DecoderState):
            reason = self.failure or self._obstacle(decoder, state)
            if reason is not None:
                if reason not in self.logged:
                    level = logging.WARNING if self.failure else logging.INFO
                    logger.log(level, "decoding without CUDA graphs, which is slower: %s", reason)
                    self.logged.add(reason)
                return None
        try:
            if isinstance(state, DecoderState):
                state = GraphState(self, decoder, state.packed or decoder.steps.packed(decoder), state)
                weakref.finalize(state, self.end)
            if state.length == state.longest:  # without graphs, this is an error
                return None
            state.ensure_capacity()
        except CaptureFailed as error:
            self.failure = str(error)
            return None
        return state

    def begin(self, decoder: Any, encoder_out: Any, rows: int) -> Optional[GraphState]:
        """The state before the first token in the graph of an earlier search, or None if there is none that fits."""
        if not self.graphs or torch.is_grad_enabled():
            return None
        try:
            start = decoder.first_state(encoder_out)
            state = GraphState(self, decoder, decoder.steps.packed(decoder), start, rows)
        except CaptureFailed:
            return None
        return None if self._obstacle(decoder, DecoderState(state.graph.blocks, 0)) else state

    def _obstacle(self, decoder: Any, state: DecoderState) -> Optional[str]:
        if not all(layer.mixer.fixed_step for layer in decoder.layers):
            return "this token mixer has no step of fixed operations"
        if any(map(has_hooks, decoder.modules())):
            return "a replay would not call the hooks of modules"
        if not all(layer.takes_step(block) for layer, block in zip(decoder.layers, state.blocks)):
            return "dropout, autocast, or rows at different positions"
        return None

    def get(self, user: GraphState, blocks: Tuple[BlockState, ...], size: Size) -> StepGraph:
        """A graph of this size that no other state uses."""
        self.graphs = [graph for graph in self.graphs if graph.packed is user.packed]
        free = [graph for graph in self.graphs if graph.user() in (None, user)]
        graph = next((graph for graph in free if graph.size == size), None)
        if graph is not None:
            self.graphs.remove(graph)
        elif not user.length:
            raise CaptureFailed("the state before the first token has no shapes")
        else:
            if len(self.graphs) >= MOST_GRAPHS and free:
                self.graphs.remove(free[0])
            capture = capture_on(next(tensors_of(blocks)).device)
            graph, reason = try_capture(partial(StepGraph, user.decoder, user.packed, blocks, size, capture))
            if graph is None:
                raise CaptureFailed(reason)
        for other in free:
            other.user = _nobody
        graph.user = weakref.ref(user)
        self.graphs.append(graph)
        return graph


def _nobody() -> None:
    return None
