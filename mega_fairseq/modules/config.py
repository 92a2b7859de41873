"""One config dataclass per module, checked when it is made: a wrong value is one sentence, before any work starts."""

from dataclasses import dataclass
from typing import Iterable, Optional, Union

from mega_fairseq.modules.linear import INITS
from mega_fairseq.modules.normalization import BATCH_NORMS, NORMS
from mega_fairseq.modules.position import POSITION_BIASES
from mega_fairseq.ops.activations import ACTIVATIONS
from mega_fairseq.ops.attention import ATTENTION_FUNCTIONS


def _choose(option: str, value: str, choices: Iterable[str]) -> None:
    if value not in choices:
        raise ValueError(f"{option} is {value!r}; choose one of {', '.join(choices)}")


def check_positive(**options: int) -> None:
    for option, value in options.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{option} is {value!r}; it must be a whole number of at least 1")


def _probabilities(**options: float) -> None:
    for option, value in options.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 <= value < 1.0:
            raise ValueError(f"{option} is {value!r}; it must be a probability from 0 up to, but not including, 1")


@dataclass(frozen=True)
class GatedAttentionConfig:
    """Moving average equipped gated attention (eq. 6-15)."""

    dim: int  # D, the width of the model
    shared_dim: int  # z, the width of queries and keys
    value_dim: int = 0  # v, the width of values; 0 means 2 dim, as in the paper
    ndim: int = 16  # h, the order of the EMA
    chunk_size: Optional[int] = None  # c; None attends to everything
    causal: bool = True
    attention: str = "softmax"  # f of eq. 11: softmax, relu2 or laplace
    position_bias: str = "simple"  # b_rel of eq. 11; rotary lets chunk and context grow beyond training
    norm: str = "layernorm"
    prenorm: bool = True  # norm the input; otherwise the output
    norm_affine: bool = True
    activation: str = "silu"  # of values and candidate; the gates keep theirs
    max_positions: int = 1024  # how far `simple` reaches where no chunk bounds it
    truncation: Optional[int] = None  # taps of the EMA kernel; None or 0 keeps them all
    dropout: float = 0.0  # on the EMA's output and on the candidate
    attention_dropout: float = 0.0  # on attention weights
    hidden_dropout: float = 0.0  # on values
    feature_dropout: bool = False  # drop whole channels instead of single entries, in `dropout` and `hidden_dropout`
    init: str = "released"  # how weights start: released, or scaled to the width they read

    def __post_init__(self) -> None:
        if self.value_dim == 0:
            object.__setattr__(self, "value_dim", 2 * self.dim)
        _check_attention(self)
        check_positive(value_dim=self.value_dim, ndim=self.ndim)
        if self.chunk_size is not None:
            check_positive(chunk_size=self.chunk_size)
        check_truncation(self.truncation)
        if self.causal and self.norm in BATCH_NORMS:
            raise ValueError(
                f"norm {self.norm!r} takes statistics over all positions, so a causal layer would see the future and a "
                "carried state could not repeat it; use layernorm, scalenorm or rmsnorm, or causal=False"
            )


@dataclass(frozen=True)
class GatedCrossAttentionConfig:
    """Gated cross attention of a translation decoder; its values are as wide as the model."""

    dim: int  # D, the width of the model
    shared_dim: int  # z, the width of queries and keys
    source_dim: int = 0  # width of the encoder's output; 0 means dim
    attention: str = "softmax"  # as in GatedAttentionConfig, and so on
    position_bias: str = "simple"
    norm: str = "layernorm"
    prenorm: bool = True
    norm_affine: bool = True
    activation: str = "silu"  # of values and candidate
    max_positions: int = 1024  # how far `simple` reaches
    dropout: float = 0.0  # on the candidate
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0
    feature_dropout: bool = False
    init: str = "released"

    def __post_init__(self) -> None:
        if self.source_dim == 0:
            object.__setattr__(self, "source_dim", self.dim)
        _check_attention(self)
        check_positive(source_dim=self.source_dim)
        if self.norm in BATCH_NORMS:
            raise ValueError(
                f"norm {self.norm!r} would see the future in a decoder; use layernorm, scalenorm or rmsnorm"
            )


def _check_attention(c: Union[GatedAttentionConfig, GatedCrossAttentionConfig]) -> None:
    """What gated self-attention and gated cross attention have in common."""
    check_positive(dim=c.dim, shared_dim=c.shared_dim, max_positions=c.max_positions)
    _choose("attention", c.attention, ATTENTION_FUNCTIONS)
    _choose("position_bias", c.position_bias, POSITION_BIASES)
    _choose("activation", c.activation, ACTIVATIONS)
    _choose("norm", c.norm, NORMS)
    _choose("init", c.init, INITS)
    _probabilities(dropout=c.dropout, attention_dropout=c.attention_dropout, hidden_dropout=c.hidden_dropout)
    if c.position_bias in ("rotary", "rope") and c.shared_dim % 2:
        raise ValueError(
            f"position_bias {c.position_bias!r} rotates pairs of dimensions and shared_dim is {c.shared_dim}; "
            "make shared_dim even"
        )


@dataclass(frozen=True)
class FeedForwardConfig:
    """The normalised feed-forward layer of a Mega block."""

    dim: int
    hidden_dim: int
    activation: str = "silu"
    norm: str = "layernorm"
    norm_affine: bool = True
    prenorm: bool = True
    dropout: float = 0.0  # on the output
    activation_dropout: float = 0.0  # on the hidden layer
    feature_dropout: bool = False
    init: str = "released"

    def __post_init__(self) -> None:
        check_positive(dim=self.dim, hidden_dim=self.hidden_dim)
        _choose("activation", self.activation, ACTIVATIONS)
        _choose("norm", self.norm, NORMS)
        _choose("init", self.init, INITS)
        _probabilities(dropout=self.dropout, activation_dropout=self.activation_dropout)


def check_truncation(truncation: Optional[int]) -> None:
    if truncation is not None and (isinstance(truncation, bool) or not isinstance(truncation, int) or truncation < 0):
        raise ValueError(f"truncation is {truncation!r}; give the number of kernel taps to keep, or 0 for all")
