"""What a layer has learned about positions, in a form that can be tabulated and drawn without knowing the layer.

`Mixer.describe` and `GatedCrossAttention.describe` return these, and `mega-fairseq inspect` shows them.
"""

from typing import Callable, List, NamedTuple, Union

from torch import Tensor

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
