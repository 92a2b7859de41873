"""`mega-fairseq inspect`: a checkpoint's architecture, parameters and half-lives, as tables and as PREFIX.json."""

import argparse
import math
from collections import Counter
from dataclasses import fields
from typing import Any, Dict, Optional

import numpy as np
import torch
from torch import Tensor, nn

from mega_fairseq.cli import errors_of
from mega_fairseq.cli.checkpoint import untrusted
from mega_fairseq.cli.checkpoint.build import empty_model, fill, stacks
from mega_fairseq.cli.checkpoint.trained import Checkpoint, read
from mega_fairseq.cli.output import check_prefix, table, write_json
from mega_fairseq.modules import MIXERS
from mega_fairseq.ops.ema.naive import LARGEST_LOGIT

Numbers = Dict[str, Any]
QUANTILES = {"min": 0.0, "10%": 0.1, "median": 0.5, "90%": 0.9, "max": 1.0}
# Tokens. The EMA limits its logits, so the half-life of a state that does not decay is log(2) exp(limit) or more.
NEVER = 0.99 * math.log(2) * math.exp(LARGEST_LOGIT)


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
    return {"architecture": _architecture(checkpoint, model), "parameters": counts, **_of_states(model)}


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


def _of_states(model: nn.Module) -> Numbers:
    """For the states of each layer and direction, the tokens after which half of them is left, and their periods."""
    lives, periods = [], []
    for side, stack in stacks(model):
        for number, layer in enumerate(stack.layers):
            config, turning = layer.mixer.config, layer.mixer.periods()
            for direction, log_decay in layer.mixer.log_decays().items():
                values, chunk = half_lives(log_decay), config.chunk_size
                beyond = None if chunk is None else float((values > chunk).mean())
                name = f"{side} layer {number} {direction}".strip()
                lives.append({"name": name, "chunk": chunk, **_quantiles(values), "beyond_chunk": beyond})
                if direction in turning:
                    periods.append({"name": name, **_quantiles(turning[direction].flatten().numpy())})
    return {"half_lives": lives, "periods": periods}


def half_lives(log_decay: Tensor) -> np.ndarray:
    """The h with decay^h = 1/2 for each state; infinite if a state never decays."""
    lives = (math.log(0.5) / log_decay.double()).flatten().numpy()
    return np.where(lives < NEVER, lives, np.inf)


def _quantiles(values: np.ndarray) -> Dict[str, Optional[float]]:
    """Each quantile is one of the values; None means infinity, which JSON cannot represent."""
    ordered = np.sort(values)
    chosen = {name: float(ordered[round(share * (ordered.size - 1))]) for name, share in QUANTILES.items()}
    return {name: value if math.isfinite(value) else None for name, value in chosen.items()}


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
