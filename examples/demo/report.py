"""The results of the demo, read from what fairseq's commands wrote: examples, a table and a figure."""

import json
import re
import statistics
import textwrap
from pathlib import Path
from typing import Dict, List

from settings import CONTEXT, CONTINUED, LANGUAGE, PROMPT, TRAINED_CHUNK, TRANSLATION, Task

from benchmarks.runs import curve, parameters

Folders = Dict[str, Dict[str, Path]]  # by task and model
COLOURS = {"Mega": "tab:red", "Transformer": "tab:blue"}
WIDTH = 110
EXAMPLES = 5  # translations to show, from the shortest quarter of the test set


def numbers(log: Path, pattern: str) -> List[float]:
    return [float(number.replace(",", "")) for number in re.findall(pattern, log.read_text(errors="replace"))]


# ------------------------------------------------------------------------------------------------ examples


def translations(folders: Dict[str, Path], raw: Path) -> List[str]:
    """Some short sentences of the test set with their reference and both translations."""
    texts = {"source": raw / "test.en", "reference": raw / "test.de"}
    texts.update((model, folder / "hypotheses.txt") for model, folder in folders.items())
    columns = {name: path.read_text(encoding="utf-8").splitlines() for name, path in texts.items()}
    by_length = sorted(range(len(columns["source"])), key=lambda row: len(columns["source"][row]))
    short = sorted(by_length[: max(EXAMPLES, len(by_length) // 4)])
    lines = [f"{EXAMPLES} short sentences of the test set"]
    for row in short[:: len(short) // EXAMPLES][:EXAMPLES]:
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
    return {
        "parameters": parameters(text),
        "training, tokens/s": statistics.median(numbers(log, r'"(?:train_)?wps": "([\d.]+)"')),
        "validation, bits per token": curve(text, "valid", f"valid_{task.loss}", "valid_num_updates")[-1][1],
    }


def translated(folder: Path) -> Dict[str, float]:
    scores, log = folder / "scores.txt", folder / "translate.log"
    return {
        "BLEU": numbers(scores, r"BLEU\S* = ([\d.]+)")[-1],
        "chrF": numbers(scores, r"chrF2\S* = ([\d.]+)")[-1],
        "translating, tokens/s": numbers(log, r"sentences/s, ([\d.]+) tokens/s")[-1],
    }


def swept(folder: Path) -> Dict[int, Dict[str, float]]:
    """Mega's scores by chunk size."""
    points = json.loads((folder / "sweep.json").read_text())["points"]
    found = {point["chunk"]: point for point in points if point["refused"] is None}
    return dict(sorted(found.items()))


def evaluated(model: str, folder: Path) -> Dict[str, float]:
    if model == "Mega":
        point = swept(folder)[TRAINED_CHUNK]
        return {"test, bits per byte": point["bits"], "evaluating, tokens/s": point["tokens"] / point["seconds"]}
    log = folder / "evaluate.log"
    return {
        "test, bits per byte": numbers(log, r"Loss \(base 2\): ([\d.]+)")[-1],
        "evaluating, tokens/s": numbers(log, r"\(([\d.]+) tokens/s\)")[-1],
    }


def report(folders: Folders, updates: Dict[str, int], out: Path) -> str:
    """Examples, the table, what it does and does not show, where the results are, and what to try next."""
    translation, language = folders[TRANSLATION.name], folders[LANGUAGE.name]
    sections = [
        (
            f"translating English to German: 27,017 pairs, {updates[TRANSLATION.name]:,} updates, beam 5",
            {model: {**trained(TRANSLATION, folder), **translated(folder)} for model, folder in translation.items()},
        ),
        (
            f"modelling language: 5 MB of bytes, {updates[LANGUAGE.name]:,} updates",
            {model: {**trained(LANGUAGE, folder), **evaluated(model, folder)} for model, folder in language.items()},
        ),
    ]
    lines = [*translations(translation, out / "bible/raw"), "", *continuation(language["Mega"]), ""]
    lines.append(f"{'':34}{'Mega':>14}{'Transformer':>14}{'ratio':>8}")
    for title, found in sections:
        lines += ["", title]
        for name in found["Mega"]:
            mega, transformer = (found[model][name] for model in ("Mega", "Transformer"))
            lines.append(f"  {name:32}{_shown(mega):>14}{_shown(transformer):>14}{mega / (transformer or 1):8.2f}")
    chunks = ", ".join(f"{point['bits']:.3f} at {chunk}" for chunk, point in swept(language["Mega"]).items())
    lines += [
        "",
        "Translation: after so few updates both models have only begun to align the two languages. The demo shows that",
        "training, beam search and scoring work, and how fast they are on short sentences. It does not show which",
        "model translates better: docs/results.md has longer training runs.",
        "",
        f"Language: Mega's chunk size is {TRAINED_CHUNK} in training and may differ in evaluation; its bits per byte",
        f"are {chunks}. The Transformer's are computed with at least {CONTEXT}",
        "bytes of context. It learns slowly here and needs more updates: docs/results.md has longer training runs.",
        "",
        f"all results are in  {out}",
        "  demo.png                learning curves",
        *[f"  {f'{name}-{updates[name]}/':24}checkpoints, logs and scores of both models" for name in folders],
        "",
        "to try next",
        "  examples/wmt16_en_de/bible/train.sh     a larger translation model, trained for longer",
        "  examples/lm/addresses/sweep.sh          perplexity by chunk and context size",
        "  README.md                               your own data, the paper's models, released checkpoints",
    ]
    return "\n".join(lines) + "\n"


def _shown(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3f}"


# ------------------------------------------------------------------------------------------------ figure


def draw(folders: Folders, figure: Path) -> None:
    """Draws the learning curves of both tasks."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("demo.png was not drawn: pip install matplotlib, then run this again")
        return
    drawing = Figure(figsize=(10, 4), layout="constrained")
    for axis, task, unit in zip(drawing.subplots(1, 2), (TRANSLATION, LANGUAGE), ("subword piece", "byte")):
        for model, folder in folders[task.name].items():
            log = (folder / "train.log").read_text(errors="replace")
            points = curve(log, "train_inner", task.loss, "num_updates")
            axis.plot(*zip(*points), color=COLOURS[model], label=model)
        axis.set(title=f"{task.name}: training loss", xlabel="updates", ylabel=f"bits per {unit}")
        axis.grid(alpha=0.3)
        axis.legend()
    drawing.savefig(figure, dpi=110)
