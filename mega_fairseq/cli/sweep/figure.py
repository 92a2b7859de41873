"""The figure of a sweep: bits or perplexity over context length and over chunk size (paper, figure 6)."""

from typing import Any, Sequence

from mega_fairseq.cli.sweep.record import Point, shown

LABELS = {"context": "context: tokens in a stream", "chunk": "chunk: tokens that attend to each other"}
# The minimum span of the y axis, so that negligible differences look negligible: in bits, or relative to perplexity.
LEAST = {"bits": 0.1, "perplexity": 0.07}


def figure(points: Sequence[Point], unit: str) -> Any:
    """The matplotlib figure of the points that were evaluated."""
    from matplotlib.figure import Figure

    points = [point for point in points if point.bits is not None]
    value = "bits" if unit == "byte" else "perplexity"
    varied = [x for x in LABELS if len({getattr(point, x) for point in points}) > 1]
    varied = varied or ["chunk" if points[0].chunk != -1 else "context"]
    drawing = Figure(figsize=(5 * len(varied), 4.2), layout="constrained")
    axes = drawing.subplots(1, len(varied), sharey=True, squeeze=False)[0]
    for axis, x in zip(axes, varied):
        _lines(axis, points, x, "chunk" if x == "context" else "context", value)
    axes[0].set(ylabel="bits per byte" if unit == "byte" else "perplexity", ylim=_limits(points, value))
    return drawing


def _lines(axis: Any, points: Sequence[Point], x: str, line: str, value: str) -> None:
    """`value` over `x`, with one line for each value of `line`."""
    found = {getattr(point, x) for point in points}
    places = {number: number if number > 0 else 2 * max(found) for number in found}  # no chunks: right of the largest
    for each in sorted({getattr(point, line) for point in points}):
        chosen = [point for point in points if getattr(point, line) == each]
        axis.plot(
            *zip(*sorted((places[getattr(point, x)], getattr(point, value)) for point in chosen)),
            marker=".",
            label=shown(each),
        )
    axis.set(xscale="log", xlabel=LABELS[x])
    axis.minorticks_off()
    axis.set_xticks(list(places.values()), [shown(number) for number in places], rotation=45, fontsize=7)
    axis.legend(title=line, fontsize=7)
    axis.grid(alpha=0.3)


def _limits(points: Sequence[Point], value: str) -> Any:
    found = [getattr(point, value) for point in points]
    low, high = min(found), max(found)
    least = LEAST[value] * (high if value == "perplexity" else 1.0)
    margin = max(least - (high - low), 0.1 * (high - low)) / 2
    return low - margin, high + margin
