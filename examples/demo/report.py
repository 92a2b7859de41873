"""The results of the demo, read from what fairseq's commands wrote: examples and a table."""

import json
import re
import statistics
import textwrap
from itertools import accumulate
from pathlib import Path
from typing import Dict, List

from settings import CONTEXT, CONTINUED, IMAGES, LANGUAGE, PROMPT, TRAINED_CHUNK, TRANSLATION, WINDOW_TOKENS, Task

from benchmarks.runs import curve
from mega_fairseq.documents import document_borders, read_lines

Folders = Dict[str, Dict[str, Path]]  # by task and model
WIDTH = 110
EXAMPLES = 5  # translated lines to show


def numbers(log: Path, pattern: str) -> List[float]:
    return [float(number.replace(",", "")) for number in re.findall(pattern, log.read_text(errors="replace"))]


# ------------------------------------------------------------------------------------------------ examples


def translations(folders: Dict[str, Path], raw: Path) -> List[str]:
    """Some lines of the longest chapter that is one window, with their reference and both translations."""
    texts = {"source": raw / "test.en", "reference": raw / "test.de"}
    texts.update((model, folder / "windows/hypotheses.txt") for model, folder in folders.items())
    columns = {name: path.read_text(encoding="utf-8").splitlines() for name, path in texts.items()}
    ids = read_lines(raw / "test.docs")
    chapters = document_borders(ids, raw / "test.docs")
    counts = json.loads((folders["Mega"] / "windows/hypotheses.json").read_text())["source_lines"]
    windows = [0, *accumulate(counts)]
    whole = set(zip(chapters, chapters[1:])) & set(zip(windows, windows[1:]))
    start, stop = max(whole, key=lambda borders: borders[1] - borders[0])
    lines = [f"{ids[start]}, a chapter of the test set, translated whole: {EXAMPLES} of its {stop - start} lines"]
    for row in (start + number * (stop - start - 1) // (EXAMPLES - 1) for number in range(EXAMPLES)):
        shown = (
            (name, textwrap.shorten(column[row], WIDTH - 15, placeholder=" ...")) for name, column in columns.items()
        )
        lines += ["", *(f"  {name:13}{sentence}" for name, sentence in shown)]
    return lines


def write_prompt(text: Path, prompt: Path) -> None:
    """Writes the beginning of a paragraph as numbers of bytes, the tokens of the language model."""
    paragraph = next(line for line in text.read_bytes().splitlines() if len(line) > PROMPT)
    prompt.write_text(" ".join(map(str, paragraph[:PROMPT].rsplit(b" ", 1)[0])) + "\n")


def continuation(folder: Path) -> List[str]:
    """The prompt and what Mega generated after it."""
    prompt = bytes(map(int, (folder / "prompt.txt").read_text().split()))
    (tokens,) = re.findall(r"^H-0\t\S+\t(.*)$", (folder / "continue.log").read_text(errors="replace"), re.MULTILINE)
    generated = bytes(int(token) for token in tokens.split() if token.isdigit())[len(prompt) :]
    shown = f"{prompt.decode(errors='replace')} [...]{generated.decode(errors='replace')}"
    title = f"a paragraph of the test text, continued by Mega after [...] with {CONTINUED} bytes"
    return [title, "", *textwrap.wrap(shown, WIDTH, initial_indent="  ", subsequent_indent="  ")]


# ------------------------------------------------------------------------------------------------ table


def trained(task: Task, folder: Path) -> Dict[str, float]:
    log = folder / "train.log"
    text = log.read_text(errors="replace")
    found = {
        "parameters": numbers(log, r"num\. shared model params: ([\d,]+)")[0],
        "training, tokens/s": statistics.median(numbers(log, r'"(?:train_)?wps": "([\d.]+)"')),
    }
    if task is not IMAGES:
        found["validation, bits per token"] = curve(text, "valid", f"valid_{task.loss}")[-1][1]
    return found


def classified(folder: Path) -> Dict[str, float]:
    found = json.loads((folder / "classified.json").read_text())
    return {
        "test, accuracy in percent": 100 * found["accuracy"],
        "classifying, images/s": found["images"] / found["seconds"],
    }


def by_length(path: Path) -> Dict[str, float]:
    """The CPU time of an update on a short and a long text, and its memory."""
    rows = json.loads(path.read_text())
    found = {f"{row['bytes']:,} bytes, ms per 1,000": row["ms per 1,000"] for row in (rows[0], rows[-1])}
    return {**found, f"{rows[-1]['bytes']:,} bytes, MiB": rows[-1]["MiB"]}


def translated(folder: Path) -> Dict[str, float]:
    found = {}
    for unit in ("lines", "windows"):
        scores, log = folder / unit / "scores.txt", folder / f"{unit}.log"
        found[f"BLEU, {unit}"] = numbers(scores, r"BLEU\S* = ([\d.]+)")[-1]
        found[f"chrF, {unit}"] = numbers(scores, r"chrF2\S* = ([\d.]+)")[-1]
        found[f"translating {unit}, tokens/s"] = numbers(log, r"sentences/s, ([\d.]+) tokens/s")[-1]
    return found


def swept(folder: Path) -> Dict[int, Dict[str, float]]:
    """The scores of a model with chunks, by their size."""
    points = json.loads((folder / "sweep.json").read_text())["points"]
    found = {point["chunk"]: point for point in points if point["refused"] is None}
    return dict(sorted(found.items()))


def evaluated(model: str, folder: Path) -> Dict[str, float]:
    if model != "Transformer":
        point = swept(folder)[TRAINED_CHUNK]
        return {"test, bits per byte": point["bits"], "evaluating, tokens/s": point["tokens"] / point["seconds"]}
    log = folder / "evaluate.log"
    return {
        "test, bits per byte": numbers(log, r"Loss \(base 2\): ([\d.]+)")[-1],
        "evaluating, tokens/s": numbers(log, r"\(([\d.]+) tokens/s\)")[-1],
    }


def table(title: str, columns: Dict[str, Dict[str, float]]) -> List[str]:
    """A column for each model, with a star at the best value."""
    lines = ["", title, (" " * 34 + "".join(f"{model:>13} " for model in columns)).rstrip()]
    for name in columns["Mega"]:
        values = [column[name] for column in columns.values()]
        lower = any(unit in name for unit in ("bits", "ms", "MiB"))
        best = None if name == "parameters" else (min if lower else max)(values)
        cells = (f"{_shown(value):>13}{'*' if value == best else ' '}" for value in values)
        lines.append(f"  {name:32}{''.join(cells)}".rstrip())
    return lines


def report(folders: Folders, timed: Dict[str, Path], updates: Dict[str, int], out: Path) -> str:
    """Examples, the table, what it does and does not show, where the results are, and what to try next."""
    translation, language, images = (folders[task.name] for task in (TRANSLATION, LANGUAGE, IMAGES))
    sections = [
        (
            f"translating English to German: 27,017 pairs, {updates[TRANSLATION.name]:,} updates, beam 2",
            {model: {**trained(TRANSLATION, folder), **translated(folder)} for model, folder in translation.items()},
        ),
        (
            f"modelling language: 5 MB of bytes, {updates[LANGUAGE.name]:,} updates",
            {model: {**trained(LANGUAGE, folder), **evaluated(model, folder)} for model, folder in language.items()},
        ),
        (
            f"classifying images pixel by pixel: 784 pixels, {updates[IMAGES.name]:,} updates",
            {model: {**trained(IMAGES, folder), **classified(folder)} for model, folder in images.items()},
        ),
        (
            "one update of the language model on one text",
            {model: by_length(path) for model, path in timed.items()},
        ),
    ]
    lines = [*translations(translation, out / "bible/raw"), "", *continuation(language["Mega"]), ""]
    lines += [line for section in sections for line in table(*section)]
    mega, attention = (
        ", ".join(f"{point['bits']:.3f} at {chunk}" for chunk, point in swept(language[model]).items())
        for model in ("Mega", "Attention")
    )
    lines += [
        "",
        "* the better value",
        "",
        "Translation: after so few updates both models have only begun to align the two languages. Which of them",
        "translates better, longer training runs show (docs/results.md). Lines are translated one by one, windows are",
        f"lines of a chapter, up to {WINDOW_TOKENS} subword pieces, translated at once. Mega counts positions by line,",
        "therefore a window costs it little.",
        "",
        f"Language: bits per byte by the chunk size of the evaluation, after {TRAINED_CHUNK} in training:",
        f"Mega {mega}; attention with RoPE, also of this",
        f"package, {attention}. fairseq's Transformer is evaluated with at least",
        f"{CONTEXT} bytes of context. It learns slowly here: docs/results.md has longer training runs.",
        "",
        "Images: both models read 784 pixels one by one, Mega in chunks of four rows. images.png shows one image of",
        "each class, what each model takes it for (mistakes in red), and which pixels its decision depends on.",
        "",
        "Length: the time for 1,000 bytes of text grows with the length of the text for the Transformer, and not for",
        "models with chunks. Mega is slower on short texts.",
        "",
        "The Transformers have the best of several learning rates (examples/demo/settings.py).",
        "",
        f"all results are in  {out}",
        "  demo.png                learning curves, and the time of an update by length",
        "  images.png              test images, with what both models look at",
        *[f"  {f'{name}-{updates[name]}/':24}checkpoints, logs and scores of all models" for name in folders],
        "",
        "to try next",
        "  examples/wmt16_en_de/bible/train.sh     a larger translation model, trained for longer",
        "  examples/lm/addresses/sweep.sh          perplexity by chunk and context size",
        "  README.md                               your own data, the paper's models, released checkpoints",
    ]
    return "\n".join(lines) + "\n"


def _shown(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3f}"
