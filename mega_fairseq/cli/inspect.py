"""`mega-fairseq inspect`: what a checkpoint holds, how far its averages reach, what position bias it has learned."""

import argparse
import json
import os
from functools import partial
from typing import Any, Dict, List, Optional, Sequence

from mega_fairseq.cli.checkpoint import read
from mega_fairseq.cli.files import check_folder, write, write_figure
from mega_fairseq.cli.quiet import quiet
from mega_fairseq.cli.refusal import Refusal

AUTHOR = "mega-fairseq inspect"
COLUMNS = ("embedding", "EMA", "attention", "cross attention", "feed-forward", "norms", "head")
QUANTILES = ("min", "10%", "median", "90%", "max")
POSITION_BIASES = {
    "simple": "a learned score for each distance",
    "rotary": "a learned function of distance, by two vectors that are rotated",
    "rope": "queries and keys are rotated, nothing is learned",
    "alibi": "scores fall by 1/256 with each token of distance, nothing is learned",
    "t5": "a learned score for each of 32 ranges of distance",
    "none": "nothing is learned",
}


def run(arguments: argparse.Namespace) -> None:
    path, prefix = arguments.checkpoint, arguments.out
    _check_prefix(prefix)
    with quiet():
        numbers = _numbers(path)
        content = {"written_by": AUTHOR, "checkpoint": path, **numbers}
        write(f"{prefix}.json", (json.dumps(content, indent=1, allow_nan=False) + "\n").encode())
        _draw(prefix, numbers)
    print("\n\n".join([architecture(numbers), parameters(numbers), half_lives(numbers)]))


def _check_prefix(prefix: str) -> None:
    """Before any work: whether PREFIX.* can be written, and are nobody else's."""
    check_folder(prefix, "inspect")
    for path in (f"{prefix}.json", f"{prefix}.png"):
        if os.path.lexists(path) and not (os.path.isfile(path) and _is_ours(f"{prefix}.json")):
            raise Refusal(f"{path} exists and no inspection wrote it; give another --out, or remove it")


def _is_ours(path: str) -> bool:
    try:
        with open(path) as file:
            return json.load(file)["written_by"] == AUTHOR
    except (KeyError, OSError, TypeError, ValueError):
        return False


def _numbers(path: str) -> Dict[str, Any]:
    checkpoint = read(path)
    try:
        # Only now: fairseq takes seconds to import.
        from mega_fairseq.cli.inspect_numbers import numbers_of

        return numbers_of(checkpoint)
    except Refusal as refusal:
        raise Refusal(f"{path} {refusal}") from None


def _draw(prefix: str, numbers: Dict[str, Any]) -> None:
    from mega_fairseq.cli.inspect_figure import figure

    write_figure(f"{prefix}.png", partial(figure, numbers, _position_bias(numbers)))


# ------------------------------------------------------------------------------------------- for people


def architecture(numbers: Dict[str, Any]) -> str:
    found = numbers["architecture"]
    languages = f", {found['source']} to {found['target']}" if found["source"] and found["target"] else ""
    lines = {"model": f"{found['model']}, task {found['task']}{languages}"}
    lines.update({side: _sizes(found[side]) for side in ("encoder", "decoder") if side in found})
    lines["attention"] = found["attention"]
    lines["position bias"] = _position_bias(numbers)
    lines["norm"] = f"{found['norm']}, {'before' if found['prenorm'] else 'after'} each layer"
    lines["head"] = found["head"]
    lines["trained"] = _training(found)
    lines["precision"] = f"stored as {found['stored_as']}, trained in {', '.join(found['trained_in']) or 'float32'}"
    return "\n".join(f"{name:14} {text}" for name, text in lines.items())


def _sizes(side: Dict[str, Any]) -> str:
    sizes = ", ".join(f"{name} {side[name]}" for name in ("D", "z", "v", "N"))
    feed_forward = "no feed-forward" if side["feed_forward"] is None else f"feed-forward {side['feed_forward']}"
    chunk = "no chunks" if side["chunk"] is None else f"chunk {side['chunk']:,}"
    taps = "" if side["truncation"] is None else f", EMA cut to {side['truncation']:,} taps"
    layers = "1 layer" if side["layers"] == 1 else f"{side['layers']} layers"
    return f"{layers}, {sizes}, {feed_forward}, {chunk}{taps}, {side['vocabulary']:,} types"


def _position_bias(numbers: Dict[str, Any]) -> str:
    name = numbers["architecture"]["position_bias"]
    return f"{name}: {POSITION_BIASES[name]}"


def _training(found: Dict[str, Any]) -> str:
    """As far as the checkpoint knows: a converted one has no counters, one trained without validation no value."""
    parts = [f"{found['updates']:,} updates" if found["updates"] else "number of updates unknown"]
    parts += [f"epoch {found['epoch']}"] if found["updates"] and found["epoch"] is not None else []
    parts += [f"criterion {found['criterion']}"]
    parts += [f"{found['metric'] or 'value'} {found['validation']:.4g}"] if found["validation"] is not None else []
    parts += [f"best so far {found['best']:.4g}"] if found["best"] is not None else ["no validation"]
    return ", ".join(parts)


def parameters(numbers: Dict[str, Any]) -> str:
    """A column for each kind of part that the model has."""
    parts, total, unique = (numbers["parameters"][key] for key in ("parts", "total", "unique"))
    columns = [column for column in COLUMNS if any(column in row for row in parts.values())]
    rows = [
        [name, *(f"{row[column]:,}" if column in row else "" for column in columns), f"{sum(row.values()):,}"]
        for name, row in parts.items()
    ]
    blank = [""] * len(columns)
    ends = [["total", *blank, f"{total:,}"], ["tied ones once", *blank, f"{unique:,}"]]
    return _table([["parameters", *columns, "all"], *rows, *ends])


def half_lives(numbers: Dict[str, Any]) -> str:
    rows = [
        [row["name"], *(_tokens(row[name]) for name in QUANTILES), _share(row["beyond_chunk"])]
        for row in numbers["half_lives"]["rows"]
    ]
    return _table([["half-lives of EMA states, in tokens", *QUANTILES, "beyond chunk"], *rows])


def _tokens(value: Optional[float]) -> str:
    if value is None:
        return "endless"
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def _share(value: Optional[float]) -> str:
    return "no chunks" if value is None else f"{value:.1%}"


def _table(rows: Sequence[Sequence[str]]) -> str:
    """The first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines: List[str] = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:])]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells]).rstrip())
    return "\n".join(lines)
