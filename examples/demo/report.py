"""What the demo has come to, read from what fairseq's commands wrote: a table and a figure."""

import json
import re
import statistics
from pathlib import Path
from typing import Dict, List

from contest import CHUNKS, CONTEXT, LANGUAGE, TRAINED_CHUNK, TRANSLATION, Task

from benchmarks.runs import curve, parameters

Folders = Dict[str, Dict[str, Path]]  # by task and model
COLOURS = {"Mega": "tab:red", "Transformer": "tab:blue"}


def numbers(log: Path, pattern: str) -> List[float]:
    return [float(number.replace(",", "")) for number in re.findall(pattern, log.read_text(errors="replace"))]


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
    """What Mega came to, by chunk."""
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


def table(folders: Folders, updates: Dict[str, int], out: Path) -> str:
    """What was done, what it scored, how fast it was, where it is and what to try next."""
    translation, language = folders[TRANSLATION.name], folders[LANGUAGE.name]
    sections = [
        (
            f"translating English to German: 27,017 pairs, {updates[TRANSLATION.name]:,} updates, beam 5",
            {model: {**trained(TRANSLATION, folder), **translated(folder)} for model, folder in translation.items()},
        ),
        (
            f"modelling language: 5 MB, byte by byte, {updates[LANGUAGE.name]:,} updates",
            {model: {**trained(LANGUAGE, folder), **evaluated(model, folder)} for model, folder in language.items()},
        ),
    ]
    lines = [f"{'':34}{'Mega':>14}{'Transformer':>14}{'ratio':>8}"]
    for title, found in sections:
        lines += ["", title]
        for name in found["Mega"]:
            mega, transformer = (found[model][name] for model in ("Mega", "Transformer"))
            lines.append(f"  {name:32}{_shown(mega):>14}{_shown(transformer):>14}{mega / (transformer or 1):8.2f}")
    lines += [
        "",
        f"Mega attended in chunks of {TRAINED_CHUNK} in training; its bits per byte at other sizes:",
        "  " + "   ".join(f"{chunk}: {point['bits']:.3f}" for chunk, point in swept(language["Mega"]).items()),
        f"The Transformer scored each byte with at least {CONTEXT} before it. Models this small, trained for minutes,",
        "say nothing about where either ends: docs/results.md has longer runs.",
        "",
        f"everything is in  {out}",
        "  demo.png                learning curves, and bits per byte against chunk size",
        *[f"  {f'{name}-{updates[name]}/':24}checkpoints, logs and scores of both models" for name in folders],
        "",
        "to try next",
        "  examples/wmt16_en_de/bible/train.sh     translate for longer, with a larger model",
        "  examples/lm/addresses/sweep.sh          perplexity against chunk and context",
        "  README.md                               your own data, the paper's models, released checkpoints",
    ]
    return "\n".join(lines) + "\n"


def _shown(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3f}"


def draw(folders: Folders, figure: Path) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("demo.png was not drawn: pip install matplotlib, and call this again")
        return
    drawing = Figure(figsize=(13, 4), layout="constrained")
    translation, language, chunks = drawing.subplots(1, 3)
    for axis, task, unit in ((translation, TRANSLATION, "piece"), (language, LANGUAGE, "byte")):
        for model, folder in folders[task.name].items():
            log = (folder / "train.log").read_text(errors="replace")
            points = curve(log, "train_inner", task.loss, "num_updates")
            axis.plot(*zip(*points), color=COLOURS[model], label=model)
        axis.set(title=f"{task.name}: training", xlabel="updates", ylabel=f"bits per {unit}")
    mega, transformer = folders[LANGUAGE.name].values()
    points = swept(mega)
    bits = [point["bits"] for point in points.values()]
    chunks.plot(list(points), bits, color=COLOURS["Mega"], marker=".", label="Mega, one stream")
    chunks.axhline(
        evaluated("Transformer", transformer)["test, bits per byte"],
        color=COLOURS["Transformer"],
        label=f"Transformer, {CONTEXT} before each",
    )
    chunks.axvline(TRAINED_CHUNK, color="grey", linestyle=":")
    chunks.set_xscale("log")
    chunks.set_xticks(CHUNKS, [str(chunk) for chunk in CHUNKS])
    chunks.minorticks_off()
    chunks.set(title="language: test", xlabel="chunk (dotted: in training)", ylabel="bits per byte")
    for axis in (translation, language, chunks):
        axis.grid(alpha=0.3)
        axis.legend()
    drawing.savefig(figure, dpi=110)
