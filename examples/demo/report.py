"""The results of the demo, read from what fairseq's commands wrote: translated lines and a table."""

import json
import re
import statistics
import textwrap
from pathlib import Path
from typing import Dict, List

from settings import IMAGES, LANGUAGE, TRANSLATION

Folders = Dict[str, Dict[str, Path]]  # by task and model
WIDTH = 95
EXAMPLES = 5  # translated lines to show


def numbers(log: Path, pattern: str) -> List[float]:
    return [float(number.replace(",", "")) for number in re.findall(pattern, log.read_text(errors="replace"))]


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


def trained(folder: Path) -> Dict[str, float]:
    log = folder / "train.log"
    return {
        "parameters": numbers(log, r"num\. shared model params: ([\d,]+)")[0],
        "training, tokens/s": statistics.median(numbers(log, r'"(?:train_)?wps": "([\d.]+)"')),
    }


def translated(folder: Path) -> Dict[str, float]:
    found = {}
    for unit in ("lines", "windows"):
        found[f"BLEU, {unit}"] = numbers(folder / unit / "scores.txt", r"BLEU\S* = ([\d.]+)")[-1]
        speed = numbers(folder / f"{unit}.log", r"sentences/s, ([\d.]+) tokens/s")
        found[f"translating {unit}, tokens/s"] = speed[-1]
    return found


def evaluated(folder: Path) -> Dict[str, float]:
    log = folder / "evaluate.log"
    return {
        "test, bits per byte": numbers(log, r"Loss \(base 2\): ([\d.]+)")[-1],
        "evaluating, tokens/s": numbers(log, r"\(([\d.]+) tokens/s\)")[-1],
    }


def classified(folder: Path) -> Dict[str, float]:
    return {"test, accuracy in percent": 100 * json.loads((folder / "classified.json").read_text())["accuracy"]}


def by_length(path: Path) -> Dict[str, float]:
    """The CPU time of an update on a short and a long text."""
    rows = json.loads(path.read_text())
    return {f"{row['bytes']:,} bytes, ms per 1,000": row["ms per 1,000"] for row in (rows[0], rows[-1])}


def table(title: str, columns: Dict[str, Dict[str, float]]) -> List[str]:
    """A column for each model, with a star at the best value."""
    lines = ["", title, (" " * 34 + "".join(f"{model:>13} " for model in columns)).rstrip()]
    for name in columns["Mega"]:
        values = [column[name] for column in columns.values()]
        best = None if name == "parameters" else (min if "bits" in name or "ms" in name else max)(values)
        cells = (f"{_shown(value):>13}{'*' if value == best else ' '}" for value in values)
        lines.append(f"  {name:32}{''.join(cells)}".rstrip())
    return lines


def report(folders: Folders, timed: Dict[str, Path], updates: Dict[str, int], out: Path) -> str:
    translation, language, images = (folders[task.name].items() for task in (TRANSLATION, LANGUAGE, IMAGES))
    lines = [
        *translations(dict(translation), out / "bible/raw"),
        *table(
            f"translating English to German: 27,017 pairs, {updates[TRANSLATION.name]:,} updates, beam 2",
            {model: {**trained(folder), **translated(folder)} for model, folder in translation},
        ),
        *table(
            f"modelling language: 5 MB of bytes, {updates[LANGUAGE.name]:,} updates",
            {model: {**trained(folder), **evaluated(folder)} for model, folder in language},
        ),
        *table(
            f"classifying images pixel by pixel: 784 pixels, {updates[IMAGES.name]:,} updates",
            {model: {**trained(folder), **classified(folder)} for model, folder in images},
        ),
        *table(
            "one update of the language model on one text",
            {model: by_length(path) for model, path in timed.items()},
        ),
        "",
        "* the better value; docs/first-run.md says what these short trainings show, and what they do not",
        f"demo.png, images.png, checkpoints and logs are in {out}",
    ]
    return "\n".join(lines) + "\n"


def _shown(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3f}"
