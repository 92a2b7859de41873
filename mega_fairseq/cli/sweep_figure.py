"""The figure of a sweep: perplexity over context length and over chunk (paper, figure 6)."""

import io
from typing import Any, Callable, Sequence

from mega_fairseq.cli.sweep_record import Point


def figure(points: Sequence[Point]) -> bytes:
    """A PNG of the points that were evaluated; raises ImportError without matplotlib."""
    from matplotlib.figure import Figure

    points = [point for point in points if point.bits is not None]
    drawing = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = drawing.subplots(1, 2, sharey=True)
    _lines(left, points, lambda point: point.chunk, lambda point: point.context)
    _lines(right, points, lambda point: point.context, lambda point: point.chunk)
    left.set(xlabel="context: tokens of a stream", ylabel="perplexity")
    left.legend(title="chunk", fontsize=7)
    right.set(xlabel="chunk: tokens that attend to each other")
    right.legend(title="context", fontsize=7)
    buffer = io.BytesIO()
    drawing.savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()


def _lines(axis: Any, points: Sequence[Point], line: Callable[[Point], int], place: Callable[[Point], int]) -> None:
    """Perplexity over `place`, one line for each value of `line`."""
    axis.set_xscale("log")
    for value in sorted({line(point) for point in points}):
        chosen = sorted((place(point), point.perplexity) for point in points if line(point) == value)
        axis.plot(*zip(*chosen), marker=".", label=f"{value:,}")
    axis.minorticks_off()
    places = sorted({place(point) for point in points})
    axis.set_xticks(places, [f"{value:,}" for value in places], rotation=45, fontsize=7)
    axis.grid(alpha=0.3)
