"""When the dropout of a layer applies: in training and, if asked for, in generation too."""

from torch import nn


class DropoutSwitch(nn.Module):
    """One for each layer, shared by its parts. Names of attributes are those of fairseq's dropout."""

    def __init__(self):
        super().__init__()
        self.apply_during_inference = False

    @property
    def on(self) -> bool:
        return self.training or self.apply_during_inference

    def rate(self, dropout: float) -> float:
        """The probability to drop with, for a layer whose option is `dropout`."""
        return dropout if self.on else 0.0
