"""The figure of a checkpoint: half-lives of states by layer, learned curves, and norms of memories."""

import re
from typing import Any, Dict, List

ROW = 0.3  # inches for a layer and direction
HEIGHT = 0.9  # of the tallest bar in its row
LINEAR = 20  # Time weights of -20 and -200 alike are e^w = 0, and would hide the curves of the other heads.


def figure(numbers: Dict[str, Any]) -> Any:
    """From left to right: half-lives; curves, a panel for each kind or, with heads, each layer; norms of memories."""
    from matplotlib.figure import Figure

    rows, memory, panels = numbers["half_lives"]["rows"], numbers["memory"], _panels(numbers["curves"])
    columns = bool(rows) + bool(panels) + bool(memory["tokens"])
    height = max(2.2 * len(panels), 1.6 + ROW * len(rows), 3.6)
    drawing = Figure(figsize=(6 * columns, height), layout="constrained")
    grid = drawing.add_gridspec(max(1, len(panels)), columns)
    if rows:
        _half_lives(drawing.add_subplot(grid[:, 0]), rows, numbers["half_lives"]["edges"])
    for place, (title, lines) in enumerate(panels.items()):
        _curves(drawing.add_subplot(grid[place, int(bool(rows))]), title, lines)
    if memory["tokens"]:
        _memory(drawing.add_subplot(grid[:, -1]), memory)
    return drawing


def _panels(curves: List[Dict[str, Any]]) -> Dict[str, List[Dict[str, Any]]]:
    """The lines of each panel, by its title: the layers' only curves together, and all heads of a layer."""
    panels: Dict[str, List[Dict[str, Any]]] = {}
    for row in curves:
        one = len(row["values"]) == 1
        place = re.sub(" layer [0-9]+", "", row["name"]) if one else row["name"]
        for label, values in zip(row["labels"], row["values"]):
            line = {"label": label or row["name"], "values": values, "first": row["first"], "axis": row["axis"]}
            panels.setdefault(f"{row['kind']}, {place}", []).append(line)
    return panels


def _half_lives(axis: Any, rows: List[Dict[str, Any]], edges: List[float]) -> None:
    """A histogram for each row, the first on top, with a line at the chunk size."""
    axis.set_xscale("log")
    for place, row in enumerate(reversed(rows)):
        most = max(row["counts"])
        tops = [place + HEIGHT * count / max(most, 1) for count in row["counts"]]
        axis.fill_between(edges, place, [*tops, tops[-1]], step="post", color="tab:blue", alpha=0.7, linewidth=0)
        if row["chunk"] is not None:
            axis.vlines(row["chunk"], place, place + 1, color="tab:red", label="chunk" if place == 0 else None)
    axis.set_yticks([place + 0.4 for place in range(len(rows))], [row["name"] for row in reversed(rows)], fontsize=7)
    axis.set(xlabel="half-life in tokens (red: chunk)", ylim=(0, len(rows)))
    axis.set_title("half-lives of states", fontsize=9)
    axis.grid(alpha=0.3, axis="x")


def _curves(axis: Any, title: str, lines: List[Dict[str, Any]]) -> None:
    for line, colour in zip(lines, _colours(len(lines))):
        positions = range(line["first"], line["first"] + len(line["values"]))
        axis.plot(positions, line["values"], color=colour, linewidth=0.8, label=line["label"])
    if max(abs(value) for line in lines for value in line["values"]) > LINEAR:
        axis.set_yscale("symlog", linthresh=1)
    axis.set_xlabel(lines[0]["axis"], fontsize=8)
    axis.set_title(title, fontsize=9)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=6, ncols=1 + len(lines) // 7, framealpha=0.6)


def _memory(axis: Any, memory: Dict[str, Any]) -> None:
    """The norms of each layer's memory over the number of tokens read: they must not grow."""
    rows = memory["rows"]
    for row, colour in zip(rows, _colours(len(rows))):
        axis.plot(memory["tokens"], row["norms"], color=colour, linewidth=0.8, label=row["name"])
    axis.set_yscale("log")
    axis.set_xlabel(f"tokens of {memory['text']['path']} that were read", fontsize=8)
    axis.set_title(f"norm of the {rows[0]['kind']}, decoder", fontsize=9)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=6, ncols=1 + len(rows) // 7, framealpha=0.6)


def _colours(count: int) -> List[Any]:
    from matplotlib import colormaps

    return [colormaps["viridis"](0.9 * place / max(1, count - 1)) for place in range(count)]
