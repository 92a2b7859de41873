"""The figure of an inspection: how far each layer's averages reach, and what position bias it has learned."""

import io
from typing import Any

from mega_fairseq.cli.inspect_numbers import Numbers

ROW = 0.3  # inches of a layer and direction
HEAD = 0.9  # share of its row that a histogram fills


def figure(numbers: Numbers, no_bias: str) -> bytes:
    """A PNG; `no_bias` says what stands where nothing is learned. Raises ImportError without matplotlib."""
    from matplotlib.figure import Figure

    rows, biases = numbers["half_lives"]["rows"], numbers["position_biases"]
    panels = list(dict.fromkeys(bias["of"] for bias in biases))
    drawing = Figure(figsize=(12, max(2.2 * len(panels), 1.6 + ROW * len(rows), 3.6)), layout="constrained")
    grid = drawing.add_gridspec(max(1, len(panels)), 2)
    _reaches(drawing.add_subplot(grid[:, 0]), rows, numbers["half_lives"]["edges"])
    for place, of in enumerate(panels):
        axis = drawing.add_subplot(grid[place, 1])
        _biases(axis, [bias for bias in biases if bias["of"] == of])
        axis.set_title(f"position bias, {of}", fontsize=9)
    if not panels:
        axis = drawing.add_subplot(grid[0, 1])
        axis.set_axis_off()
        axis.text(0.5, 0.5, no_bias, ha="center", va="center", wrap=True)
    buffer = io.BytesIO()
    drawing.savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()


def _reaches(axis: Any, rows: Any, edges: Any) -> None:
    """A histogram of half-lives in each row, the first on top; a line where a chunk ends."""
    from matplotlib.ticker import LogFormatter

    axis.set_xscale("log")
    axis.xaxis.set_major_formatter(LogFormatter())
    axis.xaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1.5, 0.5)))
    for place, row in enumerate(reversed(rows)):
        most = max(row["counts"])
        tops = [place + HEAD * count / max(most, 1) for count in row["counts"]]
        axis.fill_between(edges, place, [*tops, tops[-1]], step="post", color="tab:blue", alpha=0.7, linewidth=0)
    axis.set_yticks([place + 0.4 for place in range(len(rows))], [row["name"] for row in reversed(rows)], fontsize=7)
    axis.set(xlabel="half-life in tokens", ylim=(0, len(rows)))
    axis.set_title("how long averages remember", fontsize=9)
    axis.grid(alpha=0.3, axis="x")
    chunks = [(row["chunk"], place, place + 1) for place, row in enumerate(reversed(rows)) if row["chunk"] is not None]
    if chunks:
        axis.vlines(*zip(*chunks), color="tab:red", label="chunk")
        axis.legend(fontsize=7, loc="lower right")


def _biases(axis: Any, biases: Any) -> None:
    """A line for each layer, from the first to the last in the order of colours."""
    from matplotlib import colormaps

    for place, bias in enumerate(biases):
        distances = range(bias["first"], bias["first"] + len(bias["values"]))
        colour = colormaps["viridis"](place / max(1, len(biases) - 1))
        axis.plot(distances, bias["values"], color=colour, linewidth=0.8, label=f"layer {bias['layer']}")
    axis.set_xlabel("key minus query position", fontsize=8)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=6, ncols=1 + len(biases) // 7)
