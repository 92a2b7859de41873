"""`mega-fairseq inspect`: show what a checkpoint contains, as tables, as PREFIX.json and as a figure."""

import argparse
from functools import partial
from typing import Any, Dict, Optional, Sequence

from mega_fairseq.cli import errors_of
from mega_fairseq.cli.checkpoint.trained import read
from mega_fairseq.cli.inspect.figure import figure
from mega_fairseq.cli.inspect.numbers import QUANTILES, numbers_of
from mega_fairseq.cli.output import check_prefix, table, write_figure, write_json


def run(arguments: argparse.Namespace) -> None:
    path, prefix = arguments.checkpoint, arguments.out
    check_prefix(prefix, (".json", ".png"), "half_lives")
    with errors_of(path):
        numbers = numbers_of(read(path))
    write_json(prefix, {"checkpoint": path, **numbers})
    drawn = []
    if numbers["half_lives"]["rows"] or numbers["position_scores"]:
        drawn = write_figure(f"{prefix}.png", partial(figure, numbers))
    parts = [architecture, parameters, half_lives, position_scores]
    print("\n\n".join(filter(None, (part(numbers) for part in parts))))
    print("\nwrote", ", ".join([f"{prefix}.json", *drawn]))


def architecture(numbers: Dict[str, Any]) -> str:
    found = numbers["architecture"]
    languages = f", {found['source']} to {found['target']}" if found["source"] and found["target"] else ""
    lines = {"model": f"{found['model']}, task {found['task']}{languages}"}
    for side in ("encoder", "decoder"):
        if side in found:
            lines[side], lines[f"{side} mixer"] = _sizes(found[side]), _mixer(found[side])
    lines["norm"] = f"{found['decoder']['norm']}, {'before' if found['decoder']['prenorm'] else 'after'} each layer"
    lines["head"] = found["head"]
    lines["trained"] = _training(found)
    lines["precision"] = f"stored as {found['stored_as']}, trained in {', '.join(found['trained_in']) or 'float32'}"
    return "\n".join(f"{name:14} {text}" for name, text in lines.items())


def _sizes(side: Dict[str, Any]) -> str:
    layers = "1 layer" if side["layers"] == 1 else f"{side['layers']} layers"
    sizes = {**side["sizes"], "feed-forward": side["feed_forward"]}
    named = [f"no {name}" if size is None else f"{name} {size:,}" for name, size in sizes.items()]
    return ", ".join([layers, *named, f"{side['vocabulary']:,} types"])


def _mixer(side: Dict[str, Any]) -> str:
    given = {name.replace("_", " "): value for name, value in side["options"].items() if value}
    return ", ".join([side["mixer"], *(f"{name} {value}" for name, value in given.items())])


def _training(found: Dict[str, Any]) -> str:
    """A converted checkpoint has no counters, and one trained without validation has no best value."""
    parts = [f"{found['updates']:,} updates" if found["updates"] else "number of updates unknown"]
    parts += [f"epoch {found['epoch']}"] if found["updates"] and found["epoch"] is not None else []
    parts += [f"criterion {found['criterion']}"]
    parts += ["no validation" if found["best"] is None else f"best {found['metric']} {found['best']:.4g}"]
    return ", ".join(parts)


def parameters(numbers: Dict[str, Any]) -> str:
    """A row for each layer, a column for each kind of part."""
    parts, total, unique = (numbers["parameters"][key] for key in ("parts", "total", "unique"))
    columns = list(dict.fromkeys(column for row in parts.values() for column in row))
    columns.sort(key=["norms", "head"].__contains__)  # last
    rows = [
        [name, *(f"{row[column]:,}" if column in row else "" for column in columns), f"{sum(row.values()):,}"]
        for name, row in parts.items()
    ]
    blank = [""] * len(columns)
    ends = [["total", *blank, f"{total:,}"], ["total, tied ones once", *blank, f"{unique:,}"]]
    return table([["parameters", *columns, "all"], *rows, *ends])


def half_lives(numbers: Dict[str, Any]) -> str:
    """The quantiles of each layer and direction; nothing if no mixer has states that decay."""
    rows = [
        [row["name"], *(_tokens(row[name]) for name in QUANTILES), _share(row["beyond_chunk"])]
        for row in numbers["half_lives"]["rows"]
    ]
    return table([["half-lives of states, in tokens", *QUANTILES, "beyond chunk"], *rows]) if rows else ""


def _tokens(value: Optional[float]) -> str:
    if value is None:
        return "infinite"
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def _share(value: Optional[float]) -> str:
    return "no chunks" if value is None else f"{value:.1%}"


def position_scores(numbers: Dict[str, Any]) -> str:
    """The distances of each learned bias; nothing if no bias is learned."""
    rows = []
    for scores in numbers["position_scores"]:
        stored = [scores["first"], scores["first"] + len(scores["values"]) - 1]
        trained = scores["trained"]
        rows.append([scores["name"], _range(stored), "unknown" if trained is None else _range(trained)])
    return table([["position scores, key minus query", "stored", "trained"], *rows]) if rows else ""


def _range(ends: Sequence[int]) -> str:
    return f"{ends[0]:,} to {ends[1]:,}" if ends else "none"
