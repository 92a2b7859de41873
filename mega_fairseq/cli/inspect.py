"""`mega-fairseq inspect`: a checkpoint's architecture, parameters and half-lives, as tables and as PREFIX.json."""

import argparse
from collections import Counter
from dataclasses import fields
from typing import Any, Dict, Optional

import torch
from torch import nn

from mega_fairseq.cli import errors_of
from mega_fairseq.cli.checkpoint import untrusted
from mega_fairseq.cli.checkpoint.build import empty_model, fill, stacks
from mega_fairseq.cli.checkpoint.trained import Checkpoint, read
from mega_fairseq.cli.output import check_prefix, table, write_json
from mega_fairseq.models.half_lives import QUANTILES, of_states
from mega_fairseq.modules import MIXERS

Numbers = Dict[str, Any]


def run(arguments: argparse.Namespace) -> None:
    path, prefix = arguments.checkpoint, arguments.out
    check_prefix(prefix, (".json",), "half_lives")
    with errors_of(path):
        numbers = numbers_of(read(path))
    write_json(prefix, {"checkpoint": path, **numbers})
    tables = [half_lives_table(numbers), *([periods_table(numbers)] if numbers["periods"] else [])]
    for part in (architecture(numbers), parameters(numbers), *tables):
        print(part, end="\n\n")
    print(f"wrote {prefix}.json")


@torch.no_grad()
def numbers_of(checkpoint: Checkpoint) -> Numbers:
    """Plain values, ready for JSON."""
    model = empty_model(checkpoint)
    counts = _parameters(model)  # before `fill`, which gives tied parameters separate tensors
    fill(model, checkpoint.tensors)
    untrusted.check_finite(checkpoint.tensors)
    return {"architecture": _architecture(checkpoint, model), "parameters": counts, **of_states(model)}


# -------------------------------------------------------------------------- architecture, parameters


def _architecture(checkpoint: Checkpoint, model: nn.Module) -> Numbers:
    dtypes = Counter(str(tensor.dtype).split(".")[-1] for tensor in checkpoint.tensors.values())
    return {
        "model": checkpoint.word("model"),
        "task": checkpoint.word("task"),
        "updates": checkpoint.updates,
        "stored_as": dtypes.most_common(1)[0][0],
        **{side: _stack(stack) for side, stack in stacks(model)},
    }


def _stack(stack: nn.Module) -> Numbers:
    layer = stack.layers[0]
    config, feed_forward = layer.mixer.config, layer.feed_forward
    values = {field.name: getattr(config, field.name) for field in fields(config) if not config.is_unused(field.name)}
    return {
        "layers": len(stack.layers),
        "mixer": next(name for name, kind in MIXERS.items() if type(config) is kind),
        "vocabulary": None if stack.dictionary is None else len(stack.dictionary),
        "feed_forward": None if feed_forward is None else feed_forward.config.hidden_dim,
        "config": {name: value for name, value in values.items() if isinstance(value, (int, float, str, type(None)))},
    }


def architecture(numbers: Numbers) -> str:
    what = numbers["architecture"]
    lines = [f"{what['model']}, task {what['task']}, {what['updates']:,} updates, stored as {what['stored_as']}"]
    for side in ("encoder", "decoder"):
        if side in what:
            config = ", ".join(f"{name} {value}" for name, value in what[side]["config"].items() if value)
            inputs = "real numbers" if what[side]["vocabulary"] is None else f"{what[side]['vocabulary']:,} types"
            feed_forward = what[side]["feed_forward"] or "none"
            lines.append(f"{side}: {what[side]['layers']} x {what[side]['mixer']}, {inputs}, {config}, ")
            lines[-1] += f"feed-forward {feed_forward}"
    return "\n".join(lines)


def _parameters(model: nn.Module) -> Numbers:
    """Counts by the parts of the model. A tied parameter counts under each of its names, and once in `unique`."""
    parts: Counter = Counter()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        parts[name.partition(".")[0]] += parameter.numel()
    unique = sum(parameter.numel() for parameter in model.parameters())
    return {"parts": dict(parts), "total": sum(parts.values()), "unique": unique}


def parameters(numbers: Numbers) -> str:
    parts, total, unique = (numbers["parameters"][key] for key in ("parts", "total", "unique"))
    counts = ", ".join(f"{name} {count:,}" for name, count in parts.items())
    return f"parameters: {total:,} ({counts}); tied ones once: {unique:,}"


# ---------------------------------------------------------------------------------------- half-lives


def _shown(value: Optional[float]) -> str:
    return "infinite" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def periods_table(numbers: Numbers) -> str:
    rows = [[row["name"], *(_shown(row[name]) for name in QUANTILES)] for row in numbers["periods"]]
    return table([["periods of states, in tokens", *QUANTILES], *rows])


def half_lives_table(numbers: Numbers) -> str:
    """The quantiles of each layer and direction."""
    rows = [
        [
            row["name"],
            *(_shown(row[name]) for name in QUANTILES),
            "no chunks" if row["beyond_chunk"] is None else f"{row['beyond_chunk']:.1%}",
        ]
        for row in numbers["half_lives"]
    ]
    return table([["half-lives of states, in tokens", *QUANTILES, "beyond chunk"], *rows]) if rows else "no half-lives"
