"""`mega-fairseq inspect`: numbers about a checkpoint, as tables, as PREFIX.json and as a figure."""

import argparse
import contextlib
import math
import os
from collections import Counter
from dataclasses import fields
from functools import partial
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import numpy as np
import torch
from torch import Tensor, nn

from mega_fairseq.cli import UserError, errors_of
from mega_fairseq.cli.checkpoint import untrusted
from mega_fairseq.cli.checkpoint.build import empty_model, fill, stacks
from mega_fairseq.cli.checkpoint.trained import Checkpoint, read
from mega_fairseq.cli.inspect.figure import figure
from mega_fairseq.cli.output import check_prefix, table, write_figure, write_json
from mega_fairseq.cli.split import Split, load_split
from mega_fairseq.models import MegaLanguageModel
from mega_fairseq.modules import MIXERS, Mixer
from mega_fairseq.modules.description import Curves, Decays, RunningMemory
from mega_fairseq.ops.ema.naive import LARGEST_LOGIT

Numbers = Dict[str, Any]
# Columns of the table of parameters, by parts of names. Norms have one column, and a mixer may add columns.
NORMS = {"norm", "embed_norm", "final_norm"}
COLUMNS = {
    "embed_tokens": "embedding",
    "mixer": "mixer",
    "cross_attention": "cross attention",
    "feed_forward": "feed-forward",
    "output_projection": "head",
    "adaptive_softmax": "head",
    "classification_heads": "head",
}
PARTS = {"mixer": "", "cross_attention": " cross attention"}  # of a layer, and what their rows are called
QUANTILES = {"min": 0.0, "10%": 0.1, "median": 0.5, "90%": 0.9, "max": 1.0}
BINS = 60
MOST_POSITIONS = 4096  # in a curve: a chunk may have any size
MOST_HEADS = 32  # with a curve each; of more heads (AFT may have one for each channel) quantiles are shown
# Tokens. The EMA limits its logits, so the half-life of a state that does not decay is log(2) exp(limit) or more.
NEVER = 0.99 * math.log(2) * math.exp(LARGEST_LOGIT)
PIECES, PIECE = 64, 256  # of a text that are read to measure a memory; tokens of one, for mixers without chunks


class Learned(NamedTuple):
    """Something that a layer learned about positions, as its mixer or cross attention describes it."""

    name: str  # such as "decoder layer 0"
    part: nn.Module
    what: Any  # Curves, Decays or RunningMemory


def run(arguments: argparse.Namespace) -> None:
    path, prefix = arguments.checkpoint, arguments.out
    check_prefix(prefix, (".json", ".png"), "half_lives")
    text = None if arguments.data is None else load_split(arguments.data, "valid")
    with errors_of(path):
        numbers = numbers_of(read(path), text)
    write_json(prefix, {"checkpoint": path, **numbers})
    files = [f"{prefix}.json"]
    if numbers["half_lives"]["rows"] or numbers["curves"] or numbers["memory"]["tokens"]:
        files += write_figure(f"{prefix}.png", partial(figure, numbers))
    else:
        print(f"The mixers of {path} have no learned decays or weights of positions, so there is no figure.\n")
    if len(files) == 1:
        with contextlib.suppress(FileNotFoundError):
            os.remove(f"{prefix}.png")  # of an earlier run
    for part in filter(None, (architecture(numbers), parameters(numbers), half_lives_table(numbers))):
        print(part, end="\n\n")
    print("wrote", ", ".join(files))


@torch.no_grad()
def numbers_of(checkpoint: Checkpoint, text: Optional[Split] = None) -> Numbers:
    """Plain values, ready for JSON. Memories depend on the text."""
    model = empty_model(checkpoint)
    counts = _parameters(model)  # before `fill`, which gives tied parameters separate tensors
    fill(model, checkpoint.tensors)
    untrusted.check_finite(checkpoint.tensors)
    learned = _learned(model)
    return {
        "architecture": _architecture(checkpoint, model),
        "parameters": counts,
        "half_lives": _half_lives([each for each in learned if isinstance(each.what, Decays)]),
        "curves": [_curves(each.name, each.what) for each in learned if isinstance(each.what, Curves)],
        # changes the model's precision, so it comes last
        "memory": _memory(model, [each for each in learned if isinstance(each.what, RunningMemory)], text),
    }


def _learned(model: nn.Module) -> List[Learned]:
    return [
        Learned(f"{side} layer {i}{title}", getattr(layer, part), what)
        for side, stack in stacks(model)
        for i, layer in enumerate(stack.layers)
        for part, title in PARTS.items()
        if getattr(layer, part) is not None
        for what in getattr(layer, part).describe(MOST_POSITIONS)
    ]


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
    """Counts by layer and column. A tied parameter counts under each of its names, and once in `unique`."""
    rows: Dict[str, Dict[str, int]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        parts = name.split(".")
        row = rows.setdefault(f"{parts[0]} layer {parts[2]}" if parts[1] == "layers" else parts[0], {})
        column = _column(model, parts)
        row[column] = row.get(column, 0) + parameter.numel()
    return {
        "parts": rows,
        "total": sum(count for row in rows.values() for count in row.values()),
        "unique": sum(parameter.numel() for parameter in model.parameters()),
    }


def _column(model: nn.Module, parts: List[str]) -> str:
    if NORMS & set(parts):
        return "norms"
    if "mixer" in parts:
        place = parts.index("mixer") + 1
        return model.get_submodule(".".join(parts[:place])).PARTS.get(parts[place], "mixer")
    return next(column for part, column in COLUMNS.items() if part in parts)


def parameters(numbers: Numbers) -> str:
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


# ----------------------------------------------------------------------------------------- positions


def _half_lives(learned: List[Learned]) -> Numbers:
    """The number of tokens after which half of a state is left, for the states of each layer and direction."""
    lives = [half_lives(each.what.log_decay) for each in learned]
    finite = np.concatenate([np.empty(0), *(values[np.isfinite(values)] for values in lives)])
    low, high = (finite.min(), finite.max()) if finite.size else (1.0, 1.0)
    edges = np.geomspace(low, max(high, 2 * low), BINS + 1)  # for a logarithmic scale
    rows = []
    for each, values in zip(learned, lives):
        chunk = each.part.config.chunk_size
        rows.append(
            {
                "name": f"{each.name} {each.what.direction}".strip(),
                "chunk": chunk,
                **_quantiles(values),
                "beyond_chunk": None if chunk is None else float((values > chunk).mean()),
                "alpha": _quantiles(each.what.alpha.double().numpy()),
                "delta": _quantiles(each.what.delta.double().numpy()),
                "counts": np.histogram(values[np.isfinite(values)], edges)[0].tolist(),
            }
        )
    return {"edges": edges.tolist(), "rows": rows}


def half_lives(log_decay: Tensor) -> np.ndarray:
    """The h with decay^h = 1/2 for each state; infinite if a state never decays."""
    lives = (math.log(0.5) / log_decay.double()).flatten().numpy()
    return np.where(lives < NEVER, lives, np.inf)


def _quantiles(values: np.ndarray) -> Dict[str, Optional[float]]:
    """Each quantile is one of the values; None means infinity, which JSON cannot represent."""
    ordered = np.sort(values, axis=None)
    chosen = {name: float(ordered[round(share * (ordered.size - 1))]) for name, share in QUANTILES.items()}
    return {name: value if math.isfinite(value) else None for name, value in chosen.items()}


def half_lives_table(numbers: Numbers) -> str:
    """The quantiles of each layer and direction; nothing if no mixer has states that decay."""

    def shown(value: Optional[float]) -> str:
        return "infinite" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.2f}"

    rows = [
        [
            row["name"],
            *(shown(row[name]) for name in QUANTILES),
            "no chunks" if row["beyond_chunk"] is None else f"{row['beyond_chunk']:.1%}",
        ]
        for row in numbers["half_lives"]["rows"]
    ]
    return table([["half-lives of states, in tokens", *QUANTILES, "beyond chunk"], *rows]) if rows else ""


def _curves(name: str, learned: Curves) -> Numbers:
    """A list of values for each head, or quantiles over many heads."""
    values, heads = learned.values.double().numpy(), learned.values.size(0)
    labels = [""] if heads == 1 else [f"head {head}" for head in range(heads)]
    if heads > MOST_HEADS:
        labels = [f"{quantile} of {heads} heads" for quantile in QUANTILES]
        values = np.quantile(values, list(QUANTILES.values()), axis=0)
    curves = [[float(f"{value:.6g}") for value in curve] for curve in values.tolist()]
    shown = {"name": name, "kind": learned.name, "axis": learned.axis, "first": learned.first}
    return {**shown, "labels": labels, "values": curves}


def _memory(model: nn.Module, learned: List[Learned], text: Optional[Split]) -> Numbers:
    """The norm of each layer's running memory after numbers of `tokens` of the text: does it stay bounded?"""
    if not isinstance(model, MegaLanguageModel) or not learned:
        if text is not None:
            raise UserError("is not a language model with a running memory, which --data is for; leave out --data")
        return {"text": None, "tokens": [], "rows": []}
    rows: List[Numbers] = [{"name": each.name, "kind": each.what.name, "norms": []} for each in learned]
    if text is None:
        return {"text": None, "tokens": [], "rows": rows}
    text.check_types(model)

    def keep(row: Numbers, what: RunningMemory, mixer: Mixer, inputs: Any, output: Tuple[Tensor, Any]) -> None:
        state = getattr(output[1], "mixer", output[1])  # without token shift
        row["norms"].append(float(f"{what.read(state).norm().item():.6g}"))

    for row, each in zip(rows, learned):
        each.part.register_forward_hook(partial(keep, row, each.what))
    piece, total = max([each.part.config.chunk_size or PIECE for each in learned]), len(text.corpus)
    ends = list(range(piece, total + 1, piece))[:PIECES] or [total]
    stream = text.streams(f"size:{ends[-1]}")
    decoder = model.float().eval().decoder
    decoder.cfg.piece_tokens = piece
    decoder.extract_features(stream.collater([stream[0]])["net_input"]["src_tokens"])
    return {"text": text.origin, "tokens": ends, "rows": rows}
