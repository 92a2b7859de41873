"""The token mixer contract: all that a block, a decoder, a beam search and `inspect` use of a mixer.

A mixer is one file of `mixers/`: a `MixerConfig`, the `Mixer` that it builds, the state that this carries and, where
it has one, a faster `MixerStep` for single tokens. `mixers.MIXERS` lists them by name. Nothing outside a mixer's own
file names one of its fields.

A state is a value: a NamedTuple of batch-first tensors, of `KeyValues` for what grows token by token, and of such
tuples. `select` and `follow` walk its fields, so that a new state needs neither written for it.
"""

from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Callable, Dict, NamedTuple, Optional, Tuple, Type, Union

from torch import Tensor, nn

from mega_fairseq.modules.checks import check_padding_mask, check_sequence, check_state_shape, check_state_type
from mega_fairseq.modules.config import ModuleConfig, setting
from mega_fairseq.modules.normalization import BATCH_NORMS, SequenceNorm
from mega_fairseq.ops.chunks import KeyValues
from mega_fairseq.ops.padding import Padding, to_front

MixerState = Tuple[Any, ...]  # each mixer has a NamedTuple of its own
Shape = Tuple[Union[int, str], ...]  # a word matches any size


# ------------------------------------------------------------------------------------------- state


def select(state: MixerState, order: Tensor) -> MixerState:
    """Row i of the result continues row order[i]; rows may be repeated and left out."""
    return _walk(state, lambda t: t.index_select(0, order), lambda cache: cache.select(order))


def follow(state: MixerState, order: Tensor, last: int) -> MixerState:
    """`select` for rows that differ from the row they continue in their last `last` tokens alone.

    Caches move those tokens in place and copy no others: the caller gives `state` up.
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

    causal: bool = setting(True, "see nothing from the future, and carry a state")
    chunk_size: Optional[int] = setting(
        None, "chunk size of attention; -1 attends to everything", "{side}_chunk_size", "chunk"
    )
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
                "the future and a carried state could not repeat it; use layernorm, scalenorm or rmsnorm, or "
                "causal=False"
            )

    def build(self) -> "Mixer":
        raise NotImplementedError


# ------------------------------------------------------------------------------------------- mixer


class Batch(NamedTuple):
    """What `Mixer.mix` takes beside its input: a batch whose real tokens come first."""

    residual: Tensor  # (B, L, D) the input before the norm
    state: Optional[MixerState]
    lengths: Optional[Tensor]  # (B,) where there are pads
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
        """From the (normed) input x (B, L, D) to the output with its residual, and the next state if causal."""
        raise NotImplementedError

    def rate(self, dropout: float) -> float:
        return dropout if self.training else 0.0

    @property
    def reach(self) -> Optional[int]:
        """The longest sequence that it takes; None for any."""
        return None

    def state_shapes(self) -> Dict[str, Shape]:
        """The tensors of a state by their path in it, as in "cache.keys", and their shapes without the batch."""
        raise NotImplementedError

    def check_state(self, state: MixerState, x: Tensor) -> None:
        """Refuses a state of another module or batch."""
        if not self.config.causal:
            raise ValueError("state was given to a bidirectional layer; only causal=True carries one")
        check_state_type(state, self.State)
        for path, shape in self.state_shapes().items():
            tensor = state
            for name in path.split("."):
                tensor = getattr(tensor, name)
            check_state_shape(f"state.{path}", tensor, (x.size(0), *shape))

    def with_chunk(self, chunk_size: Optional[int]) -> "Mixer":
        """A mixer of the same parameters with another chunk size; a ValueError says why where that is impossible."""
        twin = copy(self)
        twin.config = replace(self.config, chunk_size=chunk_size)
        return twin

    def adapt(self, stored: Dict[str, Tensor], prefix: str) -> None:
        """Fits the tensors of a checkpoint to this mixer's chunk size, in place; a ValueError says why it cannot."""

    def takes_step(self, state: Optional[MixerState]) -> bool:
        """Whether a single token after `state` may go through `step()`."""
        return state is not None

    def step(self) -> Optional["MixerStep"]:
        """A faster form for single tokens, or None: then `forward` serves."""
        return None

    def learned_decays(self) -> Dict[str, Dict[str, Tensor]]:
        """What is learned about time, by direction ("" where there is one) and then by name.

        "log_decay" is the logarithm of what one token leaves of each state; other names are quantities to show with it.
        """
        return {}

    def learned_scores(self, most: int) -> Optional[Tuple[int, Tensor]]:
        """What is learned about distances: the first one (key minus query position) and a score for each from there.

        At most `most` positions are looked at; None where nothing of the kind is learned.
        """
        return None


class MixerStep:
    """A mixer for one token at a time: `y, state = step(x, state)` for x (R, 1, D).

    What does not depend on the token is computed when the step is made. So it belongs to one generation, in which no
    weight may change.
    """

    def __init__(self, mixer: Mixer):
        self.config, self.norm = mixer.config, mixer.norm

    def __call__(self, x: Tensor, state: MixerState, padding_mask: None = None) -> Tuple[Tensor, MixerState]:
        residual = x.squeeze(1)  # (R, D)
        y, state = self.mix(self.norm(residual) if self.config.prenorm else residual, residual, state)
        return (y if self.config.prenorm else self.norm(y)).unsqueeze(1), state

    def mix(self, x: Tensor, residual: Tensor, state: MixerState) -> Tuple[Tensor, MixerState]:
        """From the (normed) token x (R, D) to its output with the residual, and the next state."""
        raise NotImplementedError
