"""The token mixer interface, which blocks, decoders, beam search and `inspect` use.

A mixer is one file in `mixers/`: a `MixerConfig`, the `Mixer` that it builds, the state of that mixer, some EXAMPLES
for the tests and, optionally, a faster form for single tokens. `mixers.MIXERS` lists them by name. Code outside a
mixer's file does not use its fields. What is the same for all mixers is written here: norm, residual connection, token
shift, pads, chunks.
"""

from copy import copy
from dataclasses import dataclass, replace
from typing import Callable, ClassVar, Dict, NamedTuple, Optional, Tuple, Type, Union

from torch import Tensor

from mega_fairseq.modules.config import ModuleConfig, setting
from mega_fairseq.modules.layer import Layer, check_padding_mask
from mega_fairseq.modules.mixer_state import MixerState, OpenChunk, Shape, TokenShiftState, batch_size
from mega_fairseq.ops.attention.chunks import Attend, KeyValues, chunked, join
from mega_fairseq.ops.padding import Alignment, Padding, to_front
from mega_fairseq.ops.shift import shifted_token, token_shift

# ------------------------------------------------------------------------------------------- config


@dataclass(frozen=True)
class MixerConfig(ModuleConfig):
    """Options of every token mixer; subclasses add their own.

    A model also sets these fields of a subclass that has them: `max_positions`, `layer` (from 0) and `layers`.
    """

    causal: bool = setting(True, "use only the past, and carry a state")
    token_shift: bool = setting(
        False, "replace half of each token's channels by those of the token before", "{side}_token_shift"
    )
    hidden_dropout: float = setting(0.0, "dropout on attention's values", "hidden_dropout")

    causal_only: ClassVar[bool] = False  # whether the mixer has no bidirectional form

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_direction(self.causal, self.side)
        if self.causal:
            self.check_causal_norm()

    @classmethod
    def check_direction(cls, causal: bool, side: str) -> None:
        """Refuses to be bidirectional if there is no such form, before values are read from options of that side."""
        if cls.causal_only and not causal:
            name, other = cls.__name__[: -len("Config")], f"--{side}-token-mixer" if side else "token mixer"
            raise ValueError(f"{name} only uses the past, and an encoder uses both directions; choose another {other}")

    def final_norm(self, affine: bool) -> Optional["MixerConfig"]:
        """A norm after the last layer that carries a state, as a mixer without a residual; None for the usual one."""
        return None

    def build(self) -> "Mixer":
        """The mixer with these options, and new parameters."""
        raise NotImplementedError


@dataclass(frozen=True)
class ChunkedConfig(MixerConfig):
    """Options of mixers that attend in chunks."""

    chunk_size: Optional[int] = setting(None, "chunk size of attention", "{side}_chunk_size")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chunk_size is not None:
            self.check_positive("chunk_size")


# ------------------------------------------------------------------------------------------- mixer


class Batch(NamedTuple):
    """The other arguments of `Mixer.mix`, for a batch in which real tokens come first."""

    residual: Tensor  # (B, L, D) the input before the norm
    state: Optional[MixerState]
    align: Optional[Alignment]  # if there are pads
    padding: Optional[Tensor]  # (B, L) bool, True = pad

    @property
    def lengths(self) -> Optional[Tensor]:
        return None if self.align is None else self.align.lengths


class Mixer(Layer):
    """A token mixer with its norm and residual connection: (B, L, D) -> (B, L, D).

    Causal: `y, state = mixer(x, state, padding_mask)`; otherwise `y = mixer(x, padding_mask=padding_mask)`.
    """

    State: Type[MixerState] = tuple  # of a causal mixer, without token shift
    gated_residual = False  # whether `mix` adds the residual itself
    norm_in_mix = False  # whether `mix` applies the norm itself, where it has the state of a norm that carries one
    fixed_step = False  # whether `step()` also takes states with `FixedKeyValues`, as in CUDA graphs

    def forward(
        self, x: Tensor, state: Optional[MixerState] = None, padding_mask: Optional[Padding] = None
    ) -> Union[Tensor, Tuple[Tensor, MixerState]]:
        c, last = self.config, None
        check_padding_mask(padding_mask, x)
        if state is not None:
            self._check_state(state, x)
            last, state = state if c.token_shift else (None, state)
        x, align, padding = to_front(x, padding_mask, self.longest)
        batch = Batch(x, state, None if align is None else align.done(), padding)

        y = self.norm(x, padding) if c.prenorm and not self.norm_in_mix else x
        if c.token_shift:
            y, last = token_shift(y, last, batch.lengths)
        y, state = self.mix(y, batch)
        if not self.gated_residual:
            y = x + self.drop(y, c.dropout)
        if not (c.prenorm or self.norm_in_mix):
            y = self.norm(y, padding)

        if align is not None:
            y = align.back(y.masked_fill(padding.unsqueeze(-1), 0.0))
        if not c.causal:
            return y
        return y, TokenShiftState(last, state) if c.token_shift else state

    def mix(self, x: Tensor, batch: Batch) -> Tuple[Tensor, Optional[MixerState]]:
        """Maps the (normed, shifted) input x (B, L, D) to M(x), and the next state if causal."""
        raise NotImplementedError

    def _check_state(self, state: MixerState, x: Tensor) -> None:
        """Refuses states that would be misread; others fail where they are used."""
        kind = TokenShiftState if self.config.token_shift else self.State
        if not self.config.causal:
            raise ValueError("state was given to a bidirectional layer; only a layer with causal=True has one")
        if not isinstance(state, kind):
            raise TypeError(f"state is a {type(state).__name__}, not a {kind.__name__} (give masks as padding_mask)")
        if batch_size(state) != x.size(0):
            raise ValueError(f"state has {batch_size(state)} rows and x has {x.size(0)}; continue the same sequences")

    # What a mixer says of itself.

    @property
    def longest(self) -> Optional[int]:
        """The longest sequence that it can process; None for any length."""
        return None

    def state_shapes(self) -> Dict[str, Shape]:
        """Shapes of a state's tensors, without the batch and token shift, by their path, such as "cache.keys"."""
        raise NotImplementedError

    def log_decays(self) -> Dict[str, Tensor]:
        """The logarithm of the factor by which a token multiplies each state of an EMA, by direction: (D, N)."""
        return {}

    def periods(self) -> Dict[str, Tensor]:
        """The tokens in which each state of a complex EMA turns once, by direction as in `log_decays`: (D, N)."""
        return {}

    def with_chunk(self, chunk_size: Optional[int]) -> "Mixer":
        """A mixer with the same parameters and another chunk size; raises ValueError if that is impossible."""
        raise ValueError("this token mixer has no chunks; leave the chunk size out")

    def adapt(self, stored: Dict[str, Tensor], prefix: str) -> None:
        """Fits a checkpoint's tensors to this mixer's chunk size, in place; raises ValueError if that is impossible."""

    # Single tokens.

    def takes_step(self, state: Optional[MixerState]) -> bool:
        """Whether a single token after `state` may go through `step()`: all rows must be at the same place."""
        if isinstance(state, TokenShiftState):
            state = state.mixer
        return state is not None and all(not isinstance(f, KeyValues) or f.padding is None for f in state)

    def step(self) -> Optional["MixerStep"]:
        """A faster form for single tokens, or None to use `forward`."""
        return None


# Maps the (normed, shifted) token (R, D), its residual (R, D) and a state to M(x) (R, D) and the next state.
MixToken = Callable[[Tensor, Tensor, MixerState], Tuple[Tensor, MixerState]]


class MixerStep:
    """A mixer for one token at a time: `y, state = step(x, state)` for x (R, 1, D), without gradients or dropout.

    Whatever does not depend on the token is computed before, in `Mixer.step`, so a step is valid for one generation, in
    which no weight may change.
    """

    def __init__(self, mixer: Mixer, mix: MixToken):
        self.config, self.gated_residual, self.mix = mixer.config, mixer.gated_residual, mix
        norm = None if mixer.norm_in_mix else mixer.norm
        self.prenorm, self.postnorm = (norm, None) if mixer.config.prenorm else (None, norm)

    def __call__(self, x: Tensor, state: MixerState, padding_mask: None = None) -> Tuple[Tensor, MixerState]:
        c, residual = self.config, x.squeeze(1)  # (R, D)
        y = residual if self.prenorm is None else self.prenorm(residual)
        if c.token_shift:
            y, last = shifted_token(y, state.last)
            state = state.mixer
        y, state = self.mix(y, residual, state)
        if not self.gated_residual:
            y = residual + y
        y = (y if self.postnorm is None else self.postnorm(y)).unsqueeze(1)
        return y, TokenShiftState(last, state) if c.token_shift else state


# ------------------------------------------------------------------------------------------- chunks


class ChunkedMixer(Mixer):
    """A mixer that attends in chunks, or to all tokens if `chunk_size` is None."""

    def in_chunks(
        self, attend: Attend, q: Tensor, k: Tensor, v: Tensor, cache: Optional[KeyValues], batch: Batch
    ) -> Tuple[Tensor, Optional[KeyValues]]:
        """`attend` in each chunk: q, k (B, L, z), v (B, L, e) -> (B, L, e), and the next cache if causal."""
        size = self.config.chunk_size
        if not self.config.causal:
            return chunked(attend, q, k, v, size, batch.padding), None
        if cache is not None and cache.padding is None and size is not None and cache.keys.size(1) >= size:
            raise ValueError(
                f"state has an unfinished chunk of {cache.keys.size(1)} tokens and chunk_size is {size}; use the "
                "chunk_size that the state was made with"
            )
        joined = join(q, k, v, size, cache, batch.lengths)
        return joined.outputs(chunked(attend, joined.q, joined.k, joined.v, size)), joined.rest(size)

    def in_open_chunk(
        self, attend: Attend, q: Tensor, k: Tensor, v: Tensor, batch: Batch
    ) -> Tuple[Tensor, Optional[OpenChunk]]:
        """`in_chunks` of a mixer whose state is the unfinished chunk alone."""
        cache = None if batch.state is None else batch.state.cache
        attended, cache = self.in_chunks(attend, q, k, v, cache, batch)
        return attended, None if cache is None else OpenChunk(cache)

    def state_shapes(self) -> Dict[str, Shape]:
        return self.cache_shapes(self.config.dim, self.config.dim)

    def cache_shapes(self, keys: int, values: int) -> Dict[str, Shape]:
        """The part of `state_shapes` for keys and values of these widths."""
        length = "keys so far" if self.config.chunk_size is None else "up to chunk_size - 1"
        return {"cache.keys": (length, keys), "cache.values": (length, values)}

    def with_chunk(self, chunk_size: Optional[int]) -> "ChunkedMixer":
        twin = copy(self)
        twin.config = replace(self.config, chunk_size=chunk_size)
        return twin
