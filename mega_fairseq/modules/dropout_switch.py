"""Switches the dropout of a layer: on in training and, on request, in generation."""

from torch import nn


class DropoutSwitch(nn.Module):
    """One switch for each layer, shared by its parts. Attributes have the names of fairseq's dropout."""

    def __init__(self):
        super().__init__()
        self.apply_during_inference = False

    @property
    def on(self) -> bool:
        return self.training or self.apply_during_inference

    def rate(self, dropout: float) -> float:
        """The current probability, for a layer whose option is `dropout`."""
        return dropout if self.on else 0.0
