"""How a model runs whole sequences and single tokens: here, as its code says.

Models call these objects and know nothing else of what makes them faster. models/attach.py replaces them by others of
the same interface.
"""

from typing import Any, Callable, Optional, Tuple

from torch import Tensor

from mega_fairseq.modules.decoder_state import PackedWeights


class Passes:
    """Runs passes of a stack over whole sequences."""

    bucket: Optional[Callable[[int, int], int]] = None  # length and limit -> the length to which a batch is padded

    def for_batch(self, stack: Any, tokens: Tensor) -> "Passes":
        """The form that runs a pass over these tokens (B, L)."""
        return self

    def form_of(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """What to call in place of a function of the stack's layers, whose inputs are tensors, or tuples of them."""
        return function


class Steps:
    """Runs single tokens in generation."""

    prepared = False  # whether the decoder only generates from now on
    graphs: None = None  # CUDA graphs of steps, which a search may include in its own

    def packed(self, decoder: Any) -> PackedWeights:
        """The weights prepared for single tokens, for one generation."""
        return decoder.pack()

    def scores(self, decoder: Any, tokens: Tensor, state: Any) -> Tuple[Optional[Tensor], Any]:
        """The scores (R, V) after one more token of each row and the next state; None if the layers must be called."""
        return None, state


PASSES, STEPS = Passes(), Steps()
