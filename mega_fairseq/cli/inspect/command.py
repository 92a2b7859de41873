"""`mega-fairseq inspect`: show what a checkpoint contains, as tables, as PREFIX.json and as a figure."""

import argparse
import contextlib
import os
from functools import partial
from typing import Any, Dict, List, Optional, Sequence

from mega_fairseq.cli import errors_of
from mega_fairseq.cli.checkpoint.trained import read
from mega_fairseq.cli.inspect.curves import QUANTILES
from mega_fairseq.cli.inspect.figure import figure, has_panels
from mega_fairseq.cli.inspect.numbers import numbers_of
from mega_fairseq.cli.output import check_prefix, table, write_figure, write_json
from mega_fairseq.cli.split import load_split

COLUMNS = [sign * 10**power for power in range(5) for sign in (-1, 1)] + [0]  # distances and places in tables


def run(arguments: argparse.Namespace) -> None:
    path, prefix = arguments.checkpoint, arguments.out
    check_prefix(prefix, (".json", ".png"), "half_lives")
    text = None if arguments.data is None else load_split(arguments.data, "valid")
    with errors_of(path):
        numbers = numbers_of(read(path), text)
    write_json(prefix, {"checkpoint": path, **numbers})
    drawn = write_figure(f"{prefix}.png", partial(figure, numbers)) if has_panels(numbers) else []
    if not drawn:
        with contextlib.suppress(FileNotFoundError):
            os.remove(f"{prefix}.png")  # of an earlier run
    parts = [architecture, parameters, half_lives, curves, memory, not_shown]
    print("\n\n".join(filter(None, (part(numbers) for part in parts))))
    print("\nwrote", ", ".join([f"{prefix}.json", *drawn]))


def architecture(numbers: Dict[str, Any]) -> str:
    found = numbers["architecture"]
    languages = f", {found['source']} to {found['target']}" if found["source"] and found["target"] else ""
    lines = {"model": f"{found['model']}, task {found['task']}{languages}"}
    for side in ("encoder", "decoder"):
        if side in found:
            lines[side], lines[f"{side} mixer"] = _sizes(found[side]), _mixer(found[side])
    last = found.get("decoder") or found["encoder"]
    lines["norm"] = f"{last['norm']}, {'before' if last['prenorm'] else 'after'} each layer"
    lines["head"] = found["head"]
    lines["trained"] = _training(found)
    lines["precision"] = f"stored as {found['stored_as']}, trained in {', '.join(found['trained_in']) or 'float32'}"
    return "\n".join(f"{name:14} {text}" for name, text in lines.items())


def _sizes(side: Dict[str, Any]) -> str:
    layers = "1 layer" if side["layers"] == 1 else f"{side['layers']} layers"
    sizes = {**side["sizes"], "feed-forward": side["feed_forward"]}
    named = [f"no {name}" if size is None else f"{name} {size:,}" for name, size in sizes.items()]
    inputs = "real numbers" if side["vocabulary"] is None else f"{side['vocabulary']:,} types"
    return ", ".join([layers, *named, inputs])


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


def curves(numbers: Dict[str, Any]) -> str:
    """A table for each kind of curve: the values at some distances or places that training may have reached."""
    kinds: Dict[str, List[Dict[str, Any]]] = {}
    for found in numbers["curves"]:
        kinds.setdefault(f"{found['kind']} by {found['axis']}", []).append(found)
    return "\n\n".join(_curves(title, rows) for title, rows in kinds.items())


def _curves(title: str, rows: Sequence[Dict[str, Any]]) -> str:
    stored = [range(row["first"], row["first"] + len(row["values"][0])) for row in rows]
    shown = [_trained(row["trained"], each) for row, each in zip(rows, stored)]
    ends = {end for each in shown for end in (*each[:1], *each[-1:])}
    columns = sorted(ends | {x for x in COLUMNS if any(x in each for each in shown)})
    lines = [[title, "stored", "trained", *(f"{x:,}" for x in columns)]]
    for row, all_of_it, part in zip(rows, stored, shown):
        reach = [_range(all_of_it), "unknown" if row["trained"] is None else _range(part)]
        for label, values in zip(row["labels"], row["values"]):
            cells = [f"{values[x - row['first']]:.4g}" if x in part else "" for x in columns]
            lines.append([f"{row['name']} {label}".strip(), *reach, *cells])
            reach = ["", ""]
    return table(lines)


def _trained(ends: Optional[Sequence[int]], stored: range) -> range:
    """What training reached, as far as it is known."""
    if ends is None:
        return stored
    return range(ends[0], ends[1] + 1) if ends else range(0)


def _range(positions: range) -> str:
    return f"{positions[0]:,} to {positions[-1]:,}" if positions else "none"


def memory(numbers: Dict[str, Any]) -> str:
    """The norms of each layer's memory after 1, 2, 4, .. chunks; without a text, how to get them."""
    found = numbers["memory"]
    if not found["rows"]:
        return ""
    if found["text"] is None:
        return "The layers have a running memory, which depends on the text: --data DATA shows it after that of DATA."
    tokens = found["tokens"]
    columns = [2**power - 1 for power in range(len(tokens).bit_length())]
    title = f"norm of the {found['rows'][0]['kind']} after tokens of {found['text']['path']}"
    lines = [[row["name"], *(f"{row['norms'][i]:.4g}" for i in columns)] for row in found["rows"]]
    return table([[title, *(f"{tokens[i]:,}" for i in columns)], *lines])


def not_shown(numbers: Dict[str, Any]) -> str:
    """A sentence for an encoder or decoder whose mixer has nothing to show."""
    rows = [*numbers["half_lives"]["rows"], *numbers["curves"], *numbers["memory"]["rows"]]
    mixers = {row["name"].split()[0] for row in rows if not row["name"].endswith("cross attention")}
    return "\n".join(
        f"The {side}'s mixer, {numbers['architecture'][side]['mixer']}, has no learned decays or weights of positions "
        "with these options."
        for side in ("encoder", "decoder")
        if side in numbers["architecture"] and side not in mixers
    )
