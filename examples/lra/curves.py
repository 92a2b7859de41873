"""Draws loss and accuracy of training and validation against updates, from the JSON log of fairseq-train.

curves.py train.log curves.png
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for benchmarks/

from benchmarks.runs import curve
from mega_fairseq.cli import UserError
from mega_fairseq.cli.output import write_figure

SOURCES = {"training": ("train_inner", ""), "validation": ("valid", "valid_")}


def draw(log: str) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.5), layout="constrained")
    for axis, (name, unit) in zip(figure.subplots(1, 2), (("loss", "bits per example"), ("accuracy", "percent"))):
        for label, (source, prefix) in SOURCES.items():
            points = curve(log, source, f"{prefix}{name}")
            if points:
                axis.plot(*zip(*points), label=label, marker="o" if label == "validation" else None, markersize=3)
        axis.set(title=name, xlabel="updates", ylabel=unit)
        axis.grid(alpha=0.3)
        axis.legend()
    return figure


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    log = Path(sys.argv[1]).read_text(errors="replace")
    try:
        for path in write_figure(sys.argv[2], lambda: draw(log)):
            print(f"wrote {path}", file=sys.stderr)
    except UserError as error:
        sys.exit(f"error: {error}.")
