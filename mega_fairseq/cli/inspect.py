"""`mega-fairseq inspect`: a checkpoint's architecture, parameters and half-lives, as text and as PREFIX.json."""

import argparse
from collections import Counter
from dataclasses import fields
from typing import Any, Dict, List

import torch
from torch import nn

from mega_fairseq.cli import errors_of
from mega_fairseq.cli.checkpoint import untrusted
from mega_fairseq.cli.checkpoint.build import empty_model, fill, stacks
from mega_fairseq.cli.checkpoint.trained import Checkpoint, read
from mega_fairseq.cli.output import check_prefix, table, write_json
from mega_fairseq.models.half_lives import QUANTILES, of_states
from mega_fairseq.modules import MIXERS


def run(arguments: argparse.Namespace) -> None:
    path, prefix = arguments.checkpoint, arguments.out
    check_prefix(prefix, (".json",), "half_lives")
    with errors_of(path):
        numbers = numbers_of(read(path))
    write_json(prefix, {"checkpoint": path, **numbers})
    what, counts = numbers["architecture"], numbers["parameters"]
    print("{model}, task {task}, {updates:,} updates, stored as {stored_as}".format(**what))
    for side in (name for name in ("encoder", "decoder") if name in what):
        stack = {**what[side], **what[side]["config"], "config": None}
        print(f"{side}:", ", ".join(f"{name} {value}" for name, value in stack.items() if value))
    parts = ", ".join(f"{name} {count:,}" for name, count in counts["parts"].items())
    print(f"parameters: {counts['total']:,} ({parts}); tied ones once: {counts['unique']:,}\n")
    print(_table("half-lives", numbers["half_lives"]) if numbers["half_lives"] else "no half-lives", end="\n\n")
    if numbers["periods"]:
        print(_table("periods", numbers["periods"]), end="\n\n")
    print(f"wrote {prefix}.json")


@torch.no_grad()
def numbers_of(checkpoint: Checkpoint) -> Dict[str, Any]:
    """Plain values, ready for JSON. A tied parameter counts under each of its names, and once in `unique`."""
    model, parts = empty_model(checkpoint), Counter()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        parts[name.partition(".")[0]] += parameter.numel()
    unique = sum(parameter.numel() for parameter in model.parameters())  # `fill` gives tied ones separate tensors
    fill(model, checkpoint.tensors)
    untrusted.check_finite(checkpoint.tensors)
    dtypes = Counter(str(tensor.dtype).split(".")[-1] for tensor in checkpoint.tensors.values())
    architecture = {
        "model": checkpoint.word("model"),
        "task": checkpoint.word("task"),
        "updates": checkpoint.updates,
        "stored_as": dtypes.most_common(1)[0][0],
        **{side: _stack(stack) for side, stack in stacks(model)},
    }
    parameters = {"parts": dict(parts), "total": sum(parts.values()), "unique": unique}
    return {"architecture": architecture, "parameters": parameters, **of_states(model)}


def _stack(stack: nn.Module) -> Dict[str, Any]:
    layer = stack.layers[0]
    config, feed_forward = layer.mixer.config, layer.feed_forward
    values = {f.name: getattr(config, f.name) for f in fields(config) if f.name not in config.unused}
    return {
        "layers": len(stack.layers),
        "mixer": next(name for name, kind in MIXERS.items() if type(config) is kind),
        "vocabulary": None if stack.dictionary is None else len(stack.dictionary),
        "feed_forward": None if feed_forward is None else feed_forward.config.hidden_dim,
        "config": {name: value for name, value in values.items() if isinstance(value, (int, float, str, type(None)))},
    }


def _table(title: str, rows: List[Dict[str, Any]]) -> str:
    """The quantiles of each layer and direction."""
    lines = [[f"{title} of states, in tokens", *QUANTILES, *(["beyond chunk"] if "beyond_chunk" in rows[0] else [])]]
    for row in rows:
        values = (row[name] for name in QUANTILES)
        shown = ["infinite" if v is None else f"{v:,.0f}" if v >= 100 else f"{v:.2f}" for v in values]
        if "beyond_chunk" in row:
            shown.append("no chunks" if row["beyond_chunk"] is None else f"{row['beyond_chunk']:.1%}")
        lines.append([row["name"], *shown])
    return table(lines)
