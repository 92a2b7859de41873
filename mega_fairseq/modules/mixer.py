"""The token mixer interface, which blocks, decoders, beam search and `inspect` use.

A mixer is one file in `mixers/`: a `MixerConfig`, the `Mixer` that it builds, the state of that mixer and, optionally,
a faster `MixerStep` for single tokens. `mixers.MIXERS` lists them by name. Code outside a mixer's file does not use its
fields. What is the same for all mixers is written here: norm, residual connection, token shift, pads.
"""

from copy import copy
from dataclasses import dataclass, replace
from typing import Dict, NamedTuple, Optional, Tuple, Type, Union

from torch import Tensor, nn

from mega_fairseq.modules.checks import check_padding_mask, check_sequence, check_state_shape, check_state_type
from mega_fairseq.modules.config import ModuleConfig, setting
from mega_fairseq.modules.description import Description
from mega_fairseq.modules.dropout_switch import DropoutSwitch
from mega_fairseq.modules.mixer_state import MixerState, OpenChunk, Shape, Shifted, Sliced, check_cache, tensor_at
from mega_fairseq.modules.normalization import BATCH_NORMS, SequenceNorm
from mega_fairseq.ops.attention.chunks import Attend, KeyValues, causal_chunked, chunked
from mega_fairseq.ops.dropout import dropped
from mega_fairseq.ops.padding import Padding, to_front
from mega_fairseq.ops.sequence_parallel import Slices
from mega_fairseq.ops.shift import shifted_token, token_shift

# ------------------------------------------------------------------------------------------- config


@dataclass(frozen=True)
class MixerConfig(ModuleConfig):
    """Options of every token mixer; subclasses add their own.

    A model also sets these fields of a subclass that has them: `max_positions`, `layer` (from 0) and `layers`.
    """

    causal: bool = setting(True, "use only the past, and carry a state")
    chunk_size: Optional[int] = setting(None, "chunk size of attention", "{side}_chunk_size", "chunk")
    token_shift: bool = setting(
        False, "replace half of each token's channels by those of the token before", "{side}_token_shift"
    )
    hidden_dropout: float = setting(0.0, "dropout on attention's values", "hidden_dropout")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_probability("hidden_dropout")
        if self.chunk_size is not None:
            self.check_positive("chunk_size")
        if self.causal and self.norm in BATCH_NORMS:
            raise ValueError(
                f"{self.name('norm')} {self.norm!r} takes statistics over all positions, so a causal layer would see "
                "the future, and splitting a sequence would change outputs; use layernorm, scalenorm or rmsnorm, or "
                "causal=False"
            )

    @property
    def period(self) -> int:
        """After how many layers the pattern of mixing repeats."""
        return 1

    def build(self) -> "Mixer":
        raise NotImplementedError


# ------------------------------------------------------------------------------------------- mixer


class Batch(NamedTuple):
    """The other arguments of `Mixer.mix`, for a batch in which real tokens come first."""

    residual: Tensor  # (B, L, D) the input before the norm
    state: Optional[MixerState]
    lengths: Optional[Tensor]  # (B,) if there are pads
    padding: Optional[Tensor]  # (B, L) bool, True = pad
    slices: Optional[Slices] = None  # if the input is a slice: then there is no padding, and `state` is before all


class Mixer(nn.Module):
    """A token mixer with its norm and residual connection: (B, L, D) -> (B, L, D).

    Causal: `y, state = mixer(x, state, padding_mask)`; otherwise `y = mixer(x, padding_mask=padding_mask)`.
    """

    State: Type[MixerState] = tuple  # of a causal mixer, without token shift
    PARTS: Dict[str, str] = {}  # first part of a parameter's name -> what `inspect` counts it as
    gated_residual = False  # whether `mix` adds the residual itself
    exports_step = True  # whether a step takes the same operations at every position, as torch.export needs

    def __init__(self, config: MixerConfig):
        super().__init__()
        self.config = config
        self.norm = SequenceNorm(config.norm, config.dim, affine=config.norm_affine)
        self.dropout_module = DropoutSwitch()

    def forward(
        self,
        x: Tensor,
        state: Union[MixerState, Sliced, None] = None,
        padding_mask: Optional[Padding] = None,
    ) -> Union[Tensor, Tuple[Tensor, MixerState]]:
        c = self.config
        check_sequence("x", x, c.dim, next(self.parameters(), None))
        check_padding_mask(padding_mask, x)
        slices, state = state if isinstance(state, Sliced) else (None, state)
        if state is not None:
            self.check_state(state, x)
        last, state = state if isinstance(state, Shifted) else (None, state)
        x, align, padding = to_front(x, padding_mask, self.longest)
        batch = Batch(x, state, None if align is None else align.lengths, padding, slices)

        y = self.norm(x, padding) if c.prenorm else x
        if c.token_shift:
            y, last = token_shift(y, last, batch.lengths, slices)
        y, state = self.mix(y, batch)
        if not self.gated_residual:
            y = x + dropped(y, self.rate(c.dropout), c.feature_dropout)
        if not c.prenorm:
            y = self.norm(y, padding)

        if align is not None:
            y = align.back(y.masked_fill(padding.unsqueeze(-1), 0.0))
        if not c.causal:
            return y
        return y, Shifted(last, state) if c.token_shift else state

    def mix(self, x: Tensor, batch: Batch) -> Tuple[Tensor, Optional[MixerState]]:
        """Maps the (normed, shifted) input x (B, L, D) to M(x), and the next state if causal."""
        raise NotImplementedError

    def in_chunks(
        self, attend: Attend, q: Tensor, k: Tensor, v: Tensor, cache: Optional[KeyValues], batch: Batch
    ) -> Tuple[Tensor, Optional[KeyValues]]:
        """`attend` in each chunk: q, k (B, L, z), v (B, L, e) -> (B, L, e), and the next cache if causal."""
        size = self.config.chunk_size
        if self.config.causal:
            return causal_chunked(attend, q, k, v, size, cache, batch.lengths)
        return chunked(attend, q, k, v, size, batch.padding), None

    def in_open_chunk(
        self, attend: Attend, q: Tensor, k: Tensor, v: Tensor, batch: Batch
    ) -> Tuple[Tensor, Optional[OpenChunk]]:
        """`in_chunks` of a mixer whose state is the unfinished chunk alone."""
        cache = None if batch.state is None else batch.state.cache
        attended, cache = self.in_chunks(attend, q, k, v, cache, batch)
        return attended, None if cache is None else OpenChunk(cache)

    def cache_shapes(self, keys: int, values: int) -> Dict[str, Shape]:
        """The part of `state_shapes` for keys and values of these widths."""
        length = "keys so far" if self.config.chunk_size is None else "up to chunk_size - 1"
        return {"cache.keys": (length, keys), "cache.values": (length, values)}

    def rate(self, dropout: float) -> float:
        return self.dropout_module.rate(dropout)

    @property
    def longest(self) -> Optional[int]:
        """The longest sequence that it can process; None for any length."""
        return None

    def check_slices(self) -> None:
        """Raises ValueError if processes cannot share a sequence, cut at borders of chunks.

        By default nothing but the unfinished chunk may be carried. A mixer that carries more reads `Batch.slices`.
        """
        if self.config.chunk_size is None:
            name = self.config.name("chunk_size")
            raise ValueError(
                f"{name} is {-1 if self.config.side else None}, and processes can share a sequence only if attention "
                f"stays in chunks; give {name}, such as 2048, or one process for each sequence"
            )

    def state_shapes(self) -> Dict[str, Shape]:
        """Shapes of a state's tensors, without the batch and token shift, by their path, such as "cache.keys"."""
        raise NotImplementedError

    def check_state(self, state: MixerState, x: Tensor) -> None:
        """Raises an error for a state of another module or batch."""
        if not self.config.causal:
            raise ValueError("state was given to a bidirectional layer; only a layer with causal=True has one")
        if self.config.token_shift:
            check_state_type(state, Shifted)
            check_state_shape("state.last", state.last, (x.size(0), x.size(2) // 2))
            state = state.mixer
        check_state_type(state, self.State)
        for path, shape in self.state_shapes().items():
            check_state_shape(f"state.{path}", tensor_at(state, path), (x.size(0), *shape))
        for name, field in zip(state._fields, state):
            if isinstance(field, KeyValues):
                check_cache(f"state.{name}", field, self.config.chunk_size)

    def with_chunk(self, chunk_size: Optional[int]) -> "Mixer":
        """A mixer with the same parameters and another chunk size; raises ValueError if that is impossible."""
        twin = copy(self)
        twin.config = replace(self.config, chunk_size=chunk_size)
        return twin

    def adapt(self, stored: Dict[str, Tensor], prefix: str) -> None:
        """Fits a checkpoint's tensors to this mixer's chunk size, in place; raises ValueError if that is impossible."""

    def takes_step(self, state: Optional[MixerState]) -> bool:
        """Whether a single token after `state` may go through `step()`: all rows must be at the same place."""
        if isinstance(state, Shifted):
            state = state.mixer
        return state is not None and all(not isinstance(f, KeyValues) or f.padding is None for f in state)

    def step(self) -> Optional["MixerStep"]:
        """A faster form for single tokens, or None to use `forward`."""
        return None

    def describe(self, most: int) -> Description:
        """What it has learned about positions, for `inspect`; curves cover at most `most` positions."""
        return []


class MixerStep:
    """A mixer for one token at a time: `y, state = step(x, state)` for x (R, 1, D).

    Everything that does not depend on the token is computed when the step is created, so it is valid for one
    generation, in which no weight may change.
    """

    def __init__(self, mixer: Mixer):
        self.config, self.norm, self.gated_residual = mixer.config, mixer.norm, mixer.gated_residual

    def __call__(self, x: Tensor, state: MixerState, padding_mask: None = None) -> Tuple[Tensor, MixerState]:
        c, residual = self.config, x.squeeze(1)  # (R, D)
        y = self.norm(residual) if c.prenorm else residual
        if c.token_shift:
            y, last = shifted_token(y, state.last)
            state = state.mixer
        y, state = self.mix(y, residual, state)
        if not self.gated_residual:
            y = residual + y
        y = (y if c.prenorm else self.norm(y)).unsqueeze(1)
        return y, Shifted(last, state) if c.token_shift else state

    def mix(self, x: Tensor, residual: Tensor, state: MixerState) -> Tuple[Tensor, MixerState]:
        """Maps the (normed, shifted) token x (R, D) to M(x), and the next state."""
        raise NotImplementedError
