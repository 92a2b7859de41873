"""The figure of a checkpoint: half-lives of states by layer, and learned position scores by distance."""

import re
from typing import Any, Dict, List

ROW = 0.3  # inches for a layer and direction
HEIGHT = 0.9  # of the tallest bar in its row


def figure(numbers: Dict[str, Any]) -> Any:
    """The matplotlib figure; the checkpoint must have at least one of the two."""
    from matplotlib.figure import Figure

    rows, panels = numbers["half_lives"]["rows"], {}
    for scores in numbers["position_scores"]:
        panels.setdefault(re.sub(r" layer \d+", "", scores["name"]), []).append(scores)
    columns = bool(rows) + bool(panels)
    height = max(2.2 * len(panels), 1.6 + ROW * len(rows), 3.6)
    drawing = Figure(figsize=(6 * columns, height), layout="constrained")
    grid = drawing.add_gridspec(max(1, len(panels)), columns)
    if rows:
        _half_lives(drawing.add_subplot(grid[:, 0]), rows, numbers["half_lives"]["edges"])
    for place, (part, scores) in enumerate(panels.items()):
        axis = drawing.add_subplot(grid[place, -1])
        _scores(axis, scores)
        axis.set_title(f"position scores, {part}", fontsize=9)
    return drawing


def _half_lives(axis: Any, rows: Any, edges: Any) -> None:
    """A histogram for each row, the first on top, with a line at the chunk size."""
    from matplotlib.ticker import LogFormatter

    axis.set_xscale("log")
    axis.xaxis.set_major_formatter(LogFormatter())
    axis.xaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1.5, 0.5)))
    for place, row in enumerate(reversed(rows)):
        most = max(row["counts"])
        tops = [place + HEIGHT * count / max(most, 1) for count in row["counts"]]
        axis.fill_between(edges, place, [*tops, tops[-1]], step="post", color="tab:blue", alpha=0.7, linewidth=0)
    axis.set_yticks([place + 0.4 for place in range(len(rows))], [row["name"] for row in reversed(rows)], fontsize=7)
    axis.set(xlabel="half-life in tokens", ylim=(0, len(rows)))
    axis.set_title("half-lives of states", fontsize=9)
    axis.grid(alpha=0.3, axis="x")
    chunks = [(row["chunk"], place, place + 1) for place, row in enumerate(reversed(rows)) if row["chunk"] is not None]
    if chunks:
        axis.vlines(*zip(*chunks), color="tab:red", label="chunk")
        axis.legend(fontsize=7, loc="lower right")


def _scores(axis: Any, layers: List[Dict[str, Any]]) -> None:
    """A line for each layer; distances known to be untrained are dotted, or outside the panel."""
    from matplotlib import colormaps

    seen = []
    for place, scores in enumerate(layers):
        distances, values = range(scores["first"], scores["first"] + len(scores["values"])), scores["values"]
        trained = [distances[0], distances[-1]] if scores["trained"] is None else scores["trained"]
        colour = colormaps["viridis"](place / max(1, len(layers) - 1))
        axis.plot(distances, values, color=colour, linewidth=0.5, linestyle=":")
        if trained:
            start, stop = trained[0] - distances[0], trained[1] - distances[0] + 1
            axis.plot(distances[start:stop], values[start:stop], color=colour, linewidth=0.8, label=scores["name"])
            seen += trained
    if seen:
        margin = max(1, (max(seen) - min(seen)) // 4)
        low, high = max(min(seen) - margin, distances[0]), min(max(seen) + margin, distances[-1])
        axis.set_xlim(low - 0.5, high + 0.5)
    axis.set_xlabel("key minus query position (dotted: not reached in training)", fontsize=8)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=6, ncols=1 + len(layers) // 7)
