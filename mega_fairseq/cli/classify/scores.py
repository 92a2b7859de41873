"""How good predictions are: accuracy, loss, and which classes are taken for which."""

import math
from typing import Any, Dict, List, NamedTuple

import torch
from torch import Tensor


class Scores(NamedTuple):
    labels: List[str]
    truth: Tensor  # (N,) class numbers
    probabilities: Tensor  # (N, classes)

    @property
    def predicted(self) -> Tensor:
        return self.probabilities.argmax(1)

    @property
    def accuracy(self) -> float:
        return float(self.predicted.eq(self.truth).double().mean())

    @property
    def confusion(self) -> Tensor:
        """(classes, classes): examples of the class of a row that are predicted as that of a column."""
        classes = len(self.labels)
        return torch.bincount(classes * self.truth + self.predicted, minlength=classes**2).view(classes, classes)

    def numbers(self) -> Dict[str, Any]:
        chosen = self.probabilities.double().gather(1, self.truth[:, None]).clamp_min(1e-30)
        return {
            "examples": len(self.truth),
            "accuracy": self.accuracy,
            "bits": abs(float(chosen.log2().mean())),  # not -0.0
            "classes": self.labels,
            "confusion": self.confusion.tolist(),
        }

    def summary(self) -> str:
        count, accuracy = len(self.truth), self.accuracy
        error = math.sqrt(accuracy * (1 - accuracy) / count)
        largest = int(torch.bincount(self.truth, minlength=len(self.labels)).max()) / count
        return (
            f"accuracy {accuracy:.1%} of {count:,} examples (standard error {error:.1%}; the most frequent class has "
            f"{largest:.1%}), loss {self.numbers()['bits']:.3f} bits"
        )
