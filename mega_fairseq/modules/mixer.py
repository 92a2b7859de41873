"""The token mixer interface, which blocks, decoders, beam search and `inspect` use.

A mixer is one file in `mixers/`: a `MixerConfig`, the `Mixer` that it builds, the state of that mixer and, optionally,
a faster `MixerStep` for single tokens. `mixers.MIXERS` lists them by name. Code outside a mixer's file does not use its
fields.

A state is a value: a NamedTuple of batch-first tensors, of `KeyValues` for tensors that grow token by token, and of
such tuples. `select` and `follow` apply to every field, so a new kind of state needs no code for them.
"""

from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Callable, Dict, NamedTuple, Optional, Tuple, Type, Union

from torch import Tensor, nn

from mega_fairseq.modules.checks import check_padding_mask, check_sequence, check_state_shape, check_state_type
from mega_fairseq.modules.config import ModuleConfig, setting
from mega_fairseq.modules.dropout_switch import DropoutSwitch
from mega_fairseq.modules.normalization import BATCH_NORMS, SequenceNorm
from mega_fairseq.ops.chunks import KeyValues
from mega_fairseq.ops.padding import Padding, to_front

MixerState = Tuple[Any, ...]  # each mixer has its own NamedTuple
Shape = Tuple[Union[int, str], ...]  # a word matches any size


# ------------------------------------------------------------------------------------------- state


def select(state: MixerState, order: Tensor) -> MixerState:
    """Row i of the result is row order[i] of `state`; rows may be repeated or left out."""
    return _walk(state, lambda t: t.index_select(0, order), lambda cache: cache.select(order))


def follow(state: MixerState, order: Tensor, last: int) -> MixerState:
    """`select` for rows that differ from their replacements only in the `last` tokens.

    Caches copy only those tokens, in place, so `state` must not be used afterwards.
    """
    return _walk(state, lambda t: t.index_select(0, order), lambda cache: cache.follow(order, last))


def batch_size(state: MixerState) -> int:
    """The number of rows of a state."""
    first = state[0]
    return first.size(0) if isinstance(first, Tensor) else batch_size(first)


def _walk(part: Any, on_tensor: Callable[[Tensor], Tensor], on_cache: Callable[[KeyValues], KeyValues]) -> Any:
    if isinstance(part, Tensor):
        return on_tensor(part)
    if isinstance(part, KeyValues):
        return on_cache(part)
    if isinstance(part, tuple):
        return type(part)(*(_walk(field, on_tensor, on_cache) for field in part))
    return part


# ------------------------------------------------------------------------------------------- config


@dataclass(frozen=True)
class MixerConfig(ModuleConfig):
    """Options of every token mixer; subclasses add their own."""

    causal: bool = setting(True, "use only the past, and carry a state")
    chunk_size: Optional[int] = setting(None, "chunk size of attention", "{side}_chunk_size", "chunk")
    attention_dropout: float = setting(0.0, "dropout on attention weights", "attention_dropout")
    hidden_dropout: float = setting(0.0, "dropout on attention's values", "hidden_dropout")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_probability("attention_dropout", "hidden_dropout")
        if self.chunk_size is not None:
            self.check_positive("chunk_size")
        if self.causal and self.norm in BATCH_NORMS:
            raise ValueError(
                f"{self.name('norm')} {self.norm!r} takes statistics over all positions, so a causal layer would see "
                "the future, and splitting a sequence would change outputs; use layernorm, scalenorm or rmsnorm, or "
                "causal=False"
            )

    def build(self) -> "Mixer":
        raise NotImplementedError


# ------------------------------------------------------------------------------------------- mixer


class Batch(NamedTuple):
    """The other arguments of `Mixer.mix`, for a batch in which real tokens come first."""

    residual: Tensor  # (B, L, D) the input before the norm
    state: Optional[MixerState]
    lengths: Optional[Tensor]  # (B,) if there are pads
    padding: Optional[Tensor]  # (B, L) bool, True = pad


class Mixer(nn.Module):
    """A token mixer with its norm and residual connection: (B, L, D) -> (B, L, D).

    Causal: `y, state = mixer(x, state, padding_mask)`; otherwise `y = mixer(x, padding_mask=padding_mask)`.
    """

    State: Type[MixerState] = tuple  # of a causal mixer
    PARTS: Dict[str, str] = {}  # first part of a parameter's name -> what `inspect` counts it as

    def __init__(self, config: MixerConfig):
        super().__init__()
        self.config = config
        self.norm = SequenceNorm(config.norm, config.dim, affine=config.norm_affine)
        self.dropout_module = DropoutSwitch()

    def forward(
        self, x: Tensor, state: Optional[MixerState] = None, padding_mask: Optional[Padding] = None
    ) -> Union[Tensor, Tuple[Tensor, MixerState]]:
        c = self.config
        check_sequence("x", x, c.dim, next(self.parameters()))
        check_padding_mask(padding_mask, x)
        if state is not None:
            self.check_state(state, x)
        x, align, padding = to_front(x, padding_mask, self.reach)
        batch = Batch(x, state, None if align is None else align.lengths, padding)
        y, state = self.mix(self.norm(x, padding) if c.prenorm else x, batch)
        if not c.prenorm:
            y = self.norm(y, padding)
        if align is not None:
            y = align.back(y.masked_fill(padding.unsqueeze(-1), 0.0))
        return (y, state) if c.causal else y

    def mix(self, x: Tensor, batch: Batch) -> Tuple[Tensor, Optional[MixerState]]:
        """Maps the (normed) input x (B, L, D) to the output, residual included, and the next state if causal."""
        raise NotImplementedError

    def rate(self, dropout: float) -> float:
        return self.dropout_module.rate(dropout)

    @property
    def reach(self) -> Optional[int]:
        """The longest sequence that it can process; None for any length."""
        return None

    def state_shapes(self) -> Dict[str, Shape]:
        """Shapes of a state's tensors, without the batch, by their path in it, such as "cache.keys"."""
        raise NotImplementedError

    def check_state(self, state: MixerState, x: Tensor) -> None:
        """Raises an error for a state of another module or batch."""
        if not self.config.causal:
            raise ValueError("state was given to a bidirectional layer; only a layer with causal=True has one")
        check_state_type(state, self.State)
        for path, shape in self.state_shapes().items():
            tensor = state
            for name in path.split("."):
                tensor = getattr(tensor, name)
            check_state_shape(f"state.{path}", tensor, (x.size(0), *shape))

    def with_chunk(self, chunk_size: Optional[int]) -> "Mixer":
        """A mixer with the same parameters and another chunk size; raises ValueError if that is impossible."""
        twin = copy(self)
        twin.config = replace(self.config, chunk_size=chunk_size)
        return twin

    def adapt(self, stored: Dict[str, Tensor], prefix: str) -> None:
        """Fits a checkpoint's tensors to this mixer's chunk size, in place; raises ValueError if that is impossible."""

    def takes_step(self, state: Optional[MixerState]) -> bool:
        """Whether a single token after `state` may go through `step()`."""
        return state is not None

    def step(self) -> Optional["MixerStep"]:
        """A faster form for single tokens, or None to use `forward`."""
        return None

    def learned_decays(self) -> Dict[str, Dict[str, Tensor]]:
        """Learned decays, by direction ("" if there is only one) and then by name.

        "log_decay" is the logarithm of the factor that a token multiplies each state by; others are shown with it.
        """
        return {}

    def learned_scores(self, most: int) -> Optional[Tuple[int, Tensor]]:
        """Learned position scores: the first distance (key minus query position) and a score for each from there on.

        Covers at most `most` positions; None if no such scores are learned.
        """
        return None


class MixerStep:
    """A mixer for one token at a time: `y, state = step(x, state)` for x (R, 1, D).

    Everything that does not depend on the token is computed when the step is created, so it is valid for one
    generation, in which no weight may change.
    """

    def __init__(self, mixer: Mixer):
        self.config, self.norm = mixer.config, mixer.norm

    def __call__(self, x: Tensor, state: MixerState, padding_mask: None = None) -> Tuple[Tensor, MixerState]:
        residual = x.squeeze(1)  # (R, D)
        y, state = self.mix(self.norm(residual) if self.config.prenorm else residual, residual, state)
        return (y if self.config.prenorm else self.norm(y)).unsqueeze(1), state

    def mix(self, x: Tensor, residual: Tensor, state: MixerState) -> Tuple[Tensor, MixerState]:
        """Maps the (normed) token x (R, D) to its output, residual included, and the next state."""
        raise NotImplementedError
