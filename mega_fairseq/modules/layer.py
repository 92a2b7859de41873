"""What token mixers, cross attention and feed-forward layers share: their config, norm, dropout and padding masks."""

from typing import Any, Optional, Tuple

import torch
from torch import Tensor, nn

from mega_fairseq.modules.config import ModuleConfig
from mega_fairseq.modules.normalization import SequenceNorm
from mega_fairseq.ops.dropout import dropped, keep_mask
from mega_fairseq.ops.padding import Alignment, Padding
from mega_fairseq.ops.sequence_parallel import Slices


class DropoutSwitch(nn.Module):
    """Switches the dropout of a layer: on in training and, on request, in generation.

    The parts of a block share one. Its attributes have the names of fairseq's dropout.
    """

    def __init__(self):
        super().__init__()
        self.apply_during_inference = False

    @property
    def on(self) -> bool:
        return self.training or self.apply_during_inference

    def rate(self, dropout: float) -> float:
        """The current probability, for a layer whose option is `dropout`."""
        return dropout if self.on else 0.0


class Recurrence(nn.Module):
    """The base class of causal modules `y, state = module(x, state, padding_mask)` whose states compose.

    So several processes can share a sequence (modules/sequence_parallel.py).
    """

    @property
    def composes(self) -> bool:
        """Whether `entering` is defined with these options."""
        return True

    def entering(self, x: Tensor, before: Any, slices: Slices) -> Tuple[Any, Any]:
        """The states before this process's slice x (B, L, D) of a sequence, and after all slices.

        `before` is the state before all slices, None at the start. All processes take part in backward.
        """
        raise NotImplementedError


class Layer(nn.Module):
    """The base class of the parts of a block."""

    def __init__(self, config: ModuleConfig):
        super().__init__()
        self.config = config
        self.norm = SequenceNorm(config.norm, config.dim, affine=config.norm_affine)
        self.dropout_module = DropoutSwitch()

    def drop(self, x: Tensor, dropout: float) -> Tensor:
        """Dropout on (B, L, D) with the probability of this option of the config."""
        return dropped(x, self.dropout_module.rate(dropout), self.config.feature_dropout)

    def keep_mask(self, x: Tensor, dropout: float) -> Tuple[Optional[Tensor], float]:
        """`drop` as the mask of entries of x to keep, None for all, and their factor."""
        shape = (x.size(0), 1, x.size(2)) if self.config.feature_dropout else x.shape
        return keep_mask(shape, self.dropout_module.rate(dropout), x.device)


def check_padding_mask(mask: Optional[Padding], x: Tensor, name: str = "padding_mask") -> None:
    """Refuses masks that would be misread: of numbers instead of bool, or of another batch."""
    if mask is None:
        return
    if isinstance(mask, Alignment):
        if (mask.lengths.size(0), mask.width) != x.shape[:2] or mask.order is not None:
            raise ValueError(f"{name} is an alignment of another batch; give align.done() with align.front(x)")
    elif mask.dtype != torch.bool or mask.shape != x.shape[:2]:
        raise ValueError(
            f"{name} is {mask.dtype} of shape {tuple(mask.shape)}; it must be bool (batch, length) = "
            f"{tuple(x.shape[:2])}, with True at padding"
        )
