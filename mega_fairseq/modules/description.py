"""What a layer has learned about positions, in a form that can be tabulated and drawn without knowing the layer.

`Mixer.describe` and `GatedCrossAttention.describe` return these, and `mega-fairseq inspect` shows them.
"""

from typing import Callable, List, NamedTuple, Union

from torch import Tensor

from mega_fairseq.ops.ema.naive import log_decays

DISTANCE, PLACE = "key minus query position", "position in the chunk"  # what a curve may be a function of


class Curves(NamedTuple):
    """Learned numbers by distance or position, a curve for each head."""

    name: str
    axis: str  # DISTANCE or PLACE
    first: int  # the distance or place of the first number
    values: Tensor  # (H, n)


class Decays(NamedTuple):
    """Learned decays of an EMA's states, in one direction."""

    direction: str  # "" if there is only one
    log_decay: Tensor  # logarithm of the factor that a token multiplies each state by: (D, N)
    alpha: Tensor  # (D, N)
    delta: Tensor


class RunningMemory(NamedTuple):
    """What a causal mixer keeps of all earlier tokens, which depends on the text."""

    name: str
    read: Callable[..., Tensor]  # from a state of the mixer, without token shift: (B, ...)


Description = List[Union[Curves, Decays, RunningMemory]]


def decays(alpha: Tensor, delta: Tensor) -> Description:
    """The decays of an EMA with these logits, (1, D, N), or (2, D, N) for two directions."""
    directions = ("",) if alpha.size(0) == 1 else ("forward", "backward")
    return [Decays(name, log_decays(a, d), a.sigmoid(), d.sigmoid()) for name, a, d in zip(directions, alpha, delta)]
