"""The results of the demo, read from what fairseq's commands wrote: translated lines, a table and learning curves."""

import re
import statistics
import textwrap
from pathlib import Path
from typing import Any, Dict, List

from benchmarks.runs import curve

Folders = Dict[str, Dict[str, Path]]  # by task and model
EXAMPLES, WIDTH = 5, 95  # translated lines to show, of so many characters

TRAINED = {  # what is in which file of a model's folder, where
    "parameters": ("train.log", r"num\. shared model params: ([\d,]+)"),
    "training, tokens/s": ("train.log", r'"(?:train_)?wps": "([\d.]+)"'),
}
TRANSLATED = {
    "BLEU, lines": ("lines/scores.txt", r"BLEU\S* = ([\d.]+)"),
    "translating lines, tokens/s": ("lines.log", r"sentences/s, ([\d.]+) tokens/s"),
    "BLEU, windows": ("windows/scores.txt", r"BLEU\S* = ([\d.]+)"),
    "translating windows, tokens/s": ("windows.log", r"sentences/s, ([\d.]+) tokens/s"),
}
EVALUATED = {
    "test, bits per byte": ("test.log", r"Loss \(base 2\): ([\d.]+)"),
    "evaluating, tokens/s": ("test.log", r"\(([\d.]+) tokens/s\)"),
}
CLASSIFIED = {"test, accuracy in percent": ("test.log", r'"test_accuracy": "([\d.]+)"')}
TABLES = {
    "translation": ("translating English to German: 27,017 pairs, {:,} updates, beam 2", {**TRAINED, **TRANSLATED}),
    "language": ("modelling language: 5 MB of bytes, {:,} updates", {**TRAINED, **EVALUATED}),
    "images": ("classifying images pixel by pixel: 784 pixels, {:,} updates", {**TRAINED, **CLASSIFIED}),
}
PANELS = {  # logged where and as what
    "translation": ("train_inner", "nll_loss", "training loss", "bits per subword piece (lower is better)"),
    "language": ("train_inner", "loss", "training loss", "bits per byte (lower is better)"),
    "images": ("valid", "valid_accuracy", "accuracy on valid", "percent (higher is better)"),
}


def report(folders: Folders, updates: Dict[str, int], out: Path) -> str:
    lines = translations(folders["translation"], out / "bible/raw")
    for task, (title, rows) in TABLES.items():
        lines += ["", title.format(updates[task]), *table(folders[task], rows)]
    star = "* the better value; the trainings are too short to compare models: see docs/results.md"
    files = f"demo.png, images.png (what Mega takes the images for), checkpoints and logs are in {out}"
    return "\n".join([*lines, "", star, files]) + "\n"


def translations(folders: Dict[str, Path], raw: Path) -> List[str]:
    """Some lines of the test set with their reference and both translations."""
    texts = {"source": raw / "test.en", "reference": raw / "test.de"}
    texts.update((model, folder / "windows/hypotheses.txt") for model, folder in folders.items())
    columns = {name: path.read_text(encoding="utf-8").splitlines() for name, path in texts.items()}
    count = len(columns["source"])
    lines = [f"{EXAMPLES} of {count:,} lines of the test set, which were translated in windows"]
    for row in range(0, count, count // EXAMPLES)[:EXAMPLES]:
        shown = ((name, textwrap.shorten(column[row], WIDTH, placeholder=" ...")) for name, column in columns.items())
        lines += ["", *(f"  {name:13}{sentence}" for name, sentence in shown)]
    return lines


def table(folders: Dict[str, Path], rows: Dict[str, Any]) -> List[str]:
    """A column for each model, with a star at the best value."""
    lines = [(" " * 34 + "".join(f"{model:>13} " for model in folders)).rstrip()]
    for name, (file, pattern) in rows.items():
        found = (re.findall(pattern, (folder / file).read_text(errors="replace")) for folder in folders.values())
        values = [statistics.median(float(each.replace(",", "")) for each in all_found) for all_found in found]
        best = None if name == "parameters" else (min if "bits" in name else max)(values)
        shown = (f"{value:,.0f}" if value >= 100 else f"{value:.3f}" for value in values)
        cells = (f"{number:>13}{'*' if value == best else ' '}" for number, value in zip(shown, values))
        lines.append(f"  {name:32}{''.join(cells)}".rstrip())
    return lines


def figure(folders: Folders) -> Any:
    """The learning curves."""
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(14, 4), layout="constrained")
    for axis, (task, (source, value, title, unit)) in zip(drawing.subplots(1, 3), PANELS.items()):
        axis.set_prop_cycle(color=["tab:red", "tab:blue", "tab:green"])
        for model, folder in folders[task].items():
            log = (folder / "train.log").read_text(errors="replace")
            axis.plot(*zip(*curve(log, source, value)), label=model)
        axis.set(title=f"{task}: {title}", xlabel="updates", ylabel=unit)
        axis.grid(alpha=0.3)
        axis.legend()
    return drawing
