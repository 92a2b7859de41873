"""Draws lines in panels side by side, into a PNG."""

import json
import re
from pathlib import Path
from typing import Dict, Iterable, List, NamedTuple, Tuple


class Panel(NamedTuple):
    title: str
    x: str
    y: str
    lines: Dict[str, List[Tuple[float, float]]]  # by label
    log: bool = False  # the scale of x, with a tick at each point
    zero: bool = False  # whether y starts there


def draw_tables(path: Path, names: Iterable[str]) -> None:
    """Draws tables of a JSON file, titled "what: unit, by case", into a PNG next to it."""
    results, panels = json.loads(path.read_text()), []
    for name in names:
        title, unit, case = re.split(": |, by ", results[name]["title"])
        panels.append(Panel(title, case, unit, lines(results[name]["rows"]), log=True, zero=True))
    draw(panels, path.with_suffix(".png"))


def lines(rows: List[Dict]) -> Dict[str, List[Tuple[float, float]]]:
    """One line for each contender of a table in a JSON file, whose cases are numbers."""
    contenders = dict.fromkeys(name for row in rows for name in row["numbers"])
    return {n: [(row["case"], row["numbers"][n]) for row in rows if n in row["numbers"]] for n in contenders}


def draw(panels: List[Panel], path: Path, columns: int = 3) -> None:
    from matplotlib.figure import Figure

    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(5 * columns + 2, 4 * rows), layout="constrained")
    labels = list(dict.fromkeys(label for panel in panels for label in panel.lines))
    for axis, panel in zip(figure.subplots(rows, columns, squeeze=False).flat, panels):
        for label, points in panel.lines.items():
            number = labels.index(label)
            color = f"C{(number - 1) % 10}" if number else "black"
            axis.plot(*zip(*sorted(points)), label=label, color=color, marker="os^v"[number // 10], markersize=3)
        axis.set(title=panel.title, xlabel=panel.x, ylabel=panel.y)
        axis.grid(alpha=0.3)
        if panel.log:
            ticks = sorted({x for points in panel.lines.values() for x, _ in points})
            axis.set_xscale("log")
            axis.set_xticks(ticks, [f"{x:,}" for x in ticks], fontsize=7, rotation=30)
            axis.minorticks_off()
        if panel.zero:
            axis.set_ylim(bottom=0)
    handles = {label: line for axis in figure.axes for line, label in zip(*axis.get_legend_handles_labels())}
    figure.legend(handles.values(), handles, loc="outside right center", fontsize=8)
    figure.savefig(path, dpi=120)
