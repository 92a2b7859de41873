"""The figure of predictions: which classes are taken for which, and for values examples with their saliency."""

import math
import textwrap
from typing import Any, List, Optional

import numpy as np
import torch
from torch import Tensor

from mega_fairseq.cli.classify.scores import Scores
from mega_fairseq.cli.output import plain
from mega_fairseq.data.classification.examples import ExampleDataset
from mega_fairseq.tasks.prediction import Classifier

SHOWN = 8  # examples in a row
TITLE_WIDTH = 16  # characters of a line above an example, so that neighbours do not touch


def figure(classifier: Classifier, examples: ExampleDataset, scores: Scores) -> Any:
    from matplotlib.figure import Figure

    rows = _rows(scores) if classifier.task.dictionary is None else []
    drawing = Figure(figsize=(4.5 + (SHOWN if rows else 0), 4.5), layout="constrained")
    grid = drawing.add_gridspec(4, 4 + SHOWN if rows else 4)
    _confusion(drawing.add_subplot(grid[:, :4]), scores)
    for place, (title, chosen) in enumerate(rows):
        for column, number in enumerate(chosen):
            x = examples[number]["inputs"][0]
            above, below = (drawing.add_subplot(grid[2 * place + i, 4 + column]) for i in (0, 1))
            _example(above, x, None)
            _example(below, x, saliency(classifier, x))
            _title(above, scores, number)
        if len(chosen):
            drawing.axes[-2 * len(chosen)].set_ylabel(title, fontsize=8)
    return drawing


def _rows(scores: Scores) -> List[Any]:
    """The first examples, and the most confident mistakes."""
    wrong = scores.predicted.ne(scores.truth)
    confident = torch.where(wrong, scores.probabilities.max(1).values, torch.tensor(-1.0)).argsort(descending=True)
    mistakes = confident[: min(SHOWN, int(wrong.sum()))].tolist()
    return [("first", list(range(min(SHOWN, len(wrong))))), ("mistakes", mistakes)]


def saliency(classifier: Classifier, x: Tensor) -> np.ndarray:
    """(L,) -> how much each number changes the score of the predicted class: the gradient's absolute value."""
    device = next(classifier.parameters()).device
    given = x[None].to(device).requires_grad_()
    with torch.enable_grad():
        lengths = torch.tensor([len(x)], device=device)
        scores = classifier.scores(classifier.models[0], {"src_tokens": given, "src_lengths": lengths})
        (gradient,) = torch.autograd.grad(scores.log_softmax(-1).max(), given)
    return gradient[0].abs().cpu().numpy()


def _example(axis: Any, x: Tensor, salient: Optional[np.ndarray]) -> None:
    """A square picture, or a curve of values that do not form one."""
    shown = x.numpy() if salient is None else salient
    side = math.isqrt(len(x))
    if side**2 == len(x):
        axis.imshow(shown.reshape(side, side), cmap="gray" if salient is None else "magma")
    else:
        axis.plot(shown, linewidth=0.5, color="black" if salient is None else "tab:red")
    axis.set(xticks=[], yticks=[])


def _title(axis: Any, scores: Scores, number: int) -> None:
    label, predicted = scores.labels[scores.truth[number]], scores.labels[scores.predicted[number]]
    said = predicted if label == predicted else f"{label} as {predicted},"
    axis.set_title(
        plain(textwrap.fill(f"{said} {scores.probabilities[number].max():.2f}", TITLE_WIDTH)),
        fontsize=7,
        pad=2,
        color="black" if label == predicted else "tab:red",
    )


def _confusion(axis: Any, scores: Scores) -> None:
    counts = scores.confusion.numpy()
    shares = counts / counts.sum(1, keepdims=True).clip(1)
    axis.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    places, labels = range(len(scores.labels)), list(map(plain, scores.labels))
    axis.set(xlabel="predicted", ylabel="label", title=f"accuracy {scores.accuracy:.1%} of {len(scores.truth):,}")
    axis.set_xticks(places, labels, rotation=90 if max(map(len, scores.labels)) > 2 else 0, fontsize=7)
    axis.set_yticks(places, labels, fontsize=7)
    if len(scores.labels) <= 12:
        for row in places:
            for column in places:
                color = "white" if shares[row, column] > 0.5 else "black"
                count = int(counts[row, column]) or ""
                axis.text(column, row, count, ha="center", va="center", fontsize=7, color=color)
