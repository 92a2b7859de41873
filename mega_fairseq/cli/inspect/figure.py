"""The figure of a checkpoint: half-lives of states by layer, learned curves, and norms of memories."""

import re
from typing import Any, Dict, List, NamedTuple, Tuple

ROW = 0.3  # inches for a layer and direction
HEIGHT = 0.9  # of the tallest bar in its row
LINEAR = 20  # Time weights of -20 and -200 alike are e^w = 0, and would hide the curves of the other heads.


class Line(NamedTuple):
    """A curve in a panel."""

    label: str
    row: Dict[str, Any]  # of the numbers' "curves"
    values: List[float]


Panels = Dict[str, List[Line]]  # by title


def has_panels(numbers: Dict[str, Any]) -> bool:
    """Whether there is anything to draw."""
    return bool(numbers["half_lives"]["rows"] or numbers["curves"] or numbers["memory"]["tokens"])


def figure(numbers: Dict[str, Any]) -> Any:
    """The matplotlib figure of numbers that have panels.

    From left to right: half-lives; a column for each kind of curve with heads, a panel for each layer; and a column of
    panels with a line for each layer.
    """
    from matplotlib.figure import Figure

    rows, memory = numbers["half_lives"]["rows"], numbers["memory"]
    heads, layers = _panels(numbers["curves"])
    stacked = len(layers) + bool(memory["tokens"])
    columns = bool(rows) + len(heads) + bool(stacked)
    down = max([1, stacked, *map(len, heads.values())])
    height = max(2.2 * down, 1.6 + ROW * len(rows), 3.6)
    drawing = Figure(figsize=((6 if columns < 3 else 4.5) * columns, height), layout="constrained")
    grid = drawing.add_gridspec(down, columns)
    if rows:
        _half_lives(drawing.add_subplot(grid[:, 0]), rows, numbers["half_lives"]["edges"])
    for column, panels in enumerate(heads.values(), bool(rows)):
        first = None
        for place, (title, lines) in enumerate(panels.items()):
            first = axis = drawing.add_subplot(grid[place, column], sharex=first, sharey=first)
            _curves(axis, title, lines, legend=place == 0)
    places = [drawing.add_subplot(grid[place, -1]) for place in range(stacked)]
    for axis, (title, lines) in zip(places, layers.items()):
        _curves(axis, title, lines, legend=True)
    if memory["tokens"]:
        _memory(places[-1], memory)
    return drawing


def _panels(curves: List[Dict[str, Any]]) -> Tuple[Dict[str, Panels], Panels]:
    """Where layers have several curves, panels of one layer by their kind; then, panels of all layers."""
    heads: Dict[str, Panels] = {}
    layers: Panels = {}
    for row in curves:
        kind = f"{row['kind']}, {re.sub(' layer [0-9]+', '', row['name'])}"
        if len(row["values"]) == 1:
            layers.setdefault(kind, []).append(Line(row["name"], row, row["values"][0]))
        else:
            lines = [Line(label, row, values) for label, values in zip(row["labels"], row["values"])]
            heads.setdefault(kind, {})[f"{row['kind']}, {row['name']}"] = lines
    return heads, layers


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


def _curves(axis: Any, title: str, lines: List[Line], legend: bool) -> None:
    """The lines of a panel; distances or places known to be untrained are dotted, or outside the panel."""
    seen, dotted = [], ""
    for (label, row, values), colour in zip(lines, _colours(len(lines))):
        positions = range(row["first"], row["first"] + len(values))
        stored = [positions[0], positions[-1]]
        trained = stored if row["trained"] is None else row["trained"]
        if trained != stored:
            axis.plot(positions, values, color=colour, linewidth=0.5, linestyle=":")
            dotted = " (dotted: not reached in training)"
        if trained:
            start, stop = trained[0] - positions[0], trained[1] - positions[0] + 1
            axis.plot(positions[start:stop], values[start:stop], color=colour, linewidth=0.8, label=label)
            seen += trained
    if seen:
        margin = max(1, (max(seen) - min(seen)) // 4)
        low, high = max(min(seen) - margin, positions[0]), min(max(seen) + margin, positions[-1])
        axis.set_xlim(low - 0.5, high + 0.5)
    if max(abs(value) for line in lines for value in line.values) > LINEAR:
        axis.set_yscale("symlog", linthresh=1)
        axis.yaxis.set_major_formatter("{x:g}")
    axis.set_xlabel(row["axis"] + dotted, fontsize=8)
    axis.set_title(title, fontsize=9)
    axis.grid(alpha=0.3)
    if legend:
        _legend(axis, len(lines))


def _memory(axis: Any, memory: Dict[str, Any]) -> None:
    """The norms of each layer's memory over the number of tokens read: it must not grow."""
    rows = memory["rows"]
    for row, colour in zip(rows, _colours(len(rows))):
        axis.plot(memory["tokens"], row["norms"], color=colour, linewidth=0.8, label=row["name"])
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter("{x:g}")
    axis.set_xlabel(f"tokens of {memory['text']['path']} that were read", fontsize=8)
    axis.set_title(f"norm of the {rows[0]['kind']}, decoder", fontsize=9)
    axis.grid(alpha=0.3)
    _legend(axis, len(rows))


def _colours(count: int) -> List[Any]:
    from matplotlib import colormaps

    return [colormaps["viridis"](0.9 * place / max(1, count - 1)) for place in range(count)]


def _legend(axis: Any, lines: int) -> None:
    axis.legend(fontsize=6, ncols=1 + lines // 7, framealpha=0.6)
