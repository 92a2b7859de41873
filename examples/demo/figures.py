"""The figures of the demo: learning curves, time against length, and images with what the models look at."""

import json
from pathlib import Path
from typing import Any, Dict

from report import Folders
from settings import IMAGES, LANGUAGE, TRANSLATION

from benchmarks.runs import curve

COLOURS = {"Mega": "tab:red", "Transformer": "tab:blue", "Attention": "tab:green"}
SIDE = 28  # pixels
NAMES = ("T-shirt", "trousers", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot")  # of classes


def draw(folders: Folders, timed: Dict[str, Path], out: Path) -> None:
    """Draws demo.png and images.png."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("demo.png and images.png were not drawn: pip install matplotlib, then run this again")
        return
    drawing = Figure(figsize=(11, 7), layout="constrained")
    translation, language, images, lengths = drawing.subplots(2, 2).flat
    for axis, task, unit in ((translation, TRANSLATION, "subword piece"), (language, LANGUAGE, "byte")):
        _curves(axis, folders[task.name], "train_inner", task.loss)
        axis.set(title=f"{task.name}: training loss", xlabel="updates", ylabel=f"bits per {unit} (lower is better)")
    _curves(images, folders[IMAGES.name], "valid", "valid_accuracy")
    images.set(title="images: accuracy on valid", xlabel="updates", ylabel="percent (higher is better)")
    for model, path in timed.items():
        points = [(row["bytes"], row["ms per 1,000"]) for row in json.loads(path.read_text())]
        lengths.plot(*zip(*points), color=COLOURS[model], label=model, marker="o")
    lengths.set_xscale("log", base=2)
    lengths.set_ylim(bottom=0)
    lengths.set(title="CPU time of an update", xlabel="bytes of a text", ylabel="ms per 1,000 bytes (lower is better)")
    for axis in drawing.axes:
        axis.grid(alpha=0.3)
        axis.legend()
    drawing.savefig(out / "demo.png", dpi=110)
    found = {
        model: json.loads((folder / "classified.json").read_text()) for model, folder in folders[IMAGES.name].items()
    }
    drawing = Figure(figsize=(12, 4.2), layout="constrained")
    _images(drawing, found)
    drawing.savefig(out / "images.png", dpi=110)


def _curves(axis: Any, folders: Dict[str, Path], source: str, value: str) -> None:
    for model, folder in folders.items():
        log = (folder / "train.log").read_text(errors="replace")
        axis.plot(*zip(*curve(log, source, value)), color=COLOURS[model], label=model)


def _images(drawing: Any, found: Dict[str, Any]) -> None:
    """One test image of each class, and below it, for each model, how much each pixel changes its score."""
    columns = list(zip(*(each["shown"] for each in found.values())))
    above, *below = drawing.subplots(1 + len(found), len(columns))
    above[0].set_ylabel("test image", fontsize=8)
    for axis, image in zip(above, columns):
        _picture(axis, image[0]["pixels"], "gray", NAMES[int(image[0]["label"])])
    for row, (model, each) in zip(below, found.items()):
        row[0].set_ylabel(f"{model}: {each['accuracy']:.1%}", fontsize=8)
        for axis, shown in zip(row, each["shown"]):
            mistake = shown["predicted"] != shown["label"]
            _picture(
                axis, shown["saliency"], "magma", NAMES[int(shown["predicted"])], "tab:red" if mistake else "black"
            )


def _picture(axis: Any, values: Any, colours: str, title: str, colour: str = "black") -> None:
    axis.imshow([values[row : row + SIDE] for row in range(0, SIDE**2, SIDE)], cmap=colours)
    axis.set_title(title, fontsize=8, color=colour)
    axis.set(xticks=[], yticks=[])
