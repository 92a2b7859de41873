"""Draws what examples/encoder has logged: the loss of pre-training, and the accuracy of both trainings of a classifier.

python benchmarks/encoder_curves.py docs/encoders.png Mega=CHECKPOINTS RoBERTa=CHECKPOINTS
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also runs without installation

from benchmarks.figures import Panel, draw
from benchmarks.runs import curve

PANELS = {
    "pretrained": ("masked language model", "bits per masked byte", "loss"),
    "from-pretrained": ("eras, from the pre-trained encoder", "right in training, percent", "accuracy"),
    "from-scratch": ("eras, from scratch", "right in training, percent", "accuracy"),
}


def main(target: str, *encoders: str) -> None:
    folders = dict(encoder.split("=", 1) for encoder in encoders)
    panels = []
    for log, (title, unit, value) in PANELS.items():
        logs = {name: (Path(folder) / f"{log}.log").read_text() for name, folder in folders.items()}
        lines = {name: curve(text, "train_inner", value) for name, text in logs.items()}
        panels.append(Panel(title, "updates", unit, lines))
    draw(panels, Path(target))


if __name__ == "__main__":
    main(*sys.argv[1:])
