"""The content of PREFIX.json: plain values that describe a checkpoint."""

import math
from collections import Counter
from typing import Any, Dict, List, Optional, Tuple

import numpy as np
import torch
from torch import nn

from mega_fairseq.cli.checkpoint.build import check_finite, empty_model, fill, stacks
from mega_fairseq.cli.checkpoint.trained import Checkpoint
from mega_fairseq.cli.inspect.scores import position_scores
from mega_fairseq.modules import DampedEMA

Numbers = Dict[str, Any]

# Columns of the table of parameters, and parts of the names that they count. A norm counts as such wherever it is, and
# otherwise the first match: `attention` is a mixer without its EMA.
COLUMNS = {
    "embedding": ("embed_tokens",),
    "EMA": ("ema",),
    "attention": ("mixer",),
    "cross attention": ("cross_attention",),
    "feed-forward": ("feed_forward",),
    "norms": ("norm", "embed_norm", "final_norm"),
    "head": ("output_projection", "adaptive_softmax"),
}
QUANTILES = {"min": 0.0, "10%": 0.1, "median": 0.5, "90%": 0.9, "max": 1.0}
BINS = 60


@torch.no_grad()
def numbers_of(checkpoint: Checkpoint) -> Numbers:
    """Plain values, ready for JSON."""
    model = empty_model(checkpoint)
    parameters = _parameters(model)  # before `fill`, which gives tied parameters separate tensors
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}  # in the optimizer's order
    fill(model, checkpoint.tensors)
    check_finite(checkpoint.tensors)
    return {
        "architecture": _architecture(checkpoint, model),
        "parameters": parameters,
        "half_lives": _half_lives(model),
        "position_scores": position_scores(checkpoint, model, shapes),
    }


def layers(model: nn.Module) -> List[Tuple[str, nn.Module]]:
    """All layers with the names that tables, JSON and figure use."""
    return [(f"{side} layer {i}", layer) for side, stack in stacks(model) for i, layer in enumerate(stack.layers)]


# ------------------------------------------------------------------------------------------ architecture


def _architecture(checkpoint: Checkpoint, model: nn.Module) -> Numbers:
    common = model.decoder.layers[0].mixer.config
    dtypes = Counter(str(tensor.dtype).split(".")[-1] for tensor in checkpoint.tensors.values())
    return {
        "model": checkpoint.word("model"),
        "task": checkpoint.word("task"),
        "source": checkpoint.word("task", "source_lang"),
        "target": checkpoint.word("task", "target_lang"),
        **{side: _sizes(stack) for side, stack in stacks(model)},
        "attention": common.attention,
        "position_bias": common.position_bias,
        "norm": common.norm,
        "prenorm": common.prenorm,
        "head": _head(model.decoder),
        "updates": checkpoint.updates,
        "epoch": _epoch(checkpoint),
        "criterion": checkpoint.word("criterion"),
        "metric": checkpoint.word("checkpoint", "best_checkpoint_metric"),
        "best": checkpoint.number("best"),
        "validation": checkpoint.number("val_loss"),
        "stored_as": dtypes.most_common(1)[0][0],
        "trained_in": [name for name in ("fp16", "bf16", "amp") if checkpoint.option("common", name) is True],
    }


def _epoch(checkpoint: Checkpoint) -> Optional[float]:
    """The epoch of the last update; at an epoch's end fairseq stores the number of the next."""
    epoch, batches = (checkpoint.number("train_iterator", name) for name in ("epoch", "iterations_in_epoch"))
    return epoch if epoch is None or batches else epoch - 1


def _sizes(stack: nn.Module) -> Numbers:
    layer = stack.layers[0]
    c, feed_forward = layer.mixer.config, layer.feed_forward
    return {
        "vocabulary": len(stack.dictionary),
        "layers": len(stack.layers),
        "D": c.dim,
        "z": c.shared_dim,
        "v": c.value_dim,
        "feed_forward": None if feed_forward is None else feed_forward.config.hidden_dim,
        "N": c.ndim,
        "chunk": c.chunk_size,
        "truncation": c.truncation or None,
    }


def _head(decoder: nn.Module) -> str:
    if decoder.adaptive_softmax is not None:
        tied = ", tied to the embedding" if getattr(decoder.cfg, "tie_adaptive_weights", False) else ""
        return f"adaptive softmax with cutoffs {decoder.cfg.adaptive_softmax_cutoff}{tied}"
    return "softmax, tied to the embedding" if decoder.output_projection is None else "softmax"


# -------------------------------------------------------------------------------------------- parameters


def _parameters(model: nn.Module) -> Numbers:
    """Counts by layer and column. A tied parameter counts under each of its names, and once in `unique`."""
    rows: Dict[str, Dict[str, int]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        parts = name.split(".")
        row = rows.setdefault(f"{parts[0]} layer {parts[2]}" if parts[1] == "layers" else parts[0], {})
        column = next(column for column in ("norms", *COLUMNS) if set(COLUMNS[column]) & set(parts))
        row[column] = row.get(column, 0) + parameter.numel()
    return {
        "parts": rows,
        "total": sum(count for row in rows.values() for count in row.values()),
        "unique": sum(parameter.numel() for parameter in model.parameters()),
    }


# -------------------------------------------------------------------------------------------- half-lives


def _half_lives(model: nn.Module) -> Numbers:
    """The number of tokens after which half of a state is left, for the D x N states of each layer and direction."""
    found = [
        (name, layer.mixer.config.chunk_size, layer.mixer.ema, direction, half_lives(layer.mixer.ema, direction))
        for layer_name, layer in layers(model)
        for direction, name in enumerate(_directions(layer_name, layer.mixer.ema))
    ]
    edges = _edges(np.concatenate([lives for *_, lives in found]))
    rows = [
        {
            "name": name,
            "chunk": chunk,
            **_quantiles(lives),
            "beyond_chunk": None if chunk is None else float((lives > chunk).mean()),
            "alpha": _quantiles(torch.sigmoid(ema.alpha[direction].double()).numpy()),
            "delta": _quantiles(torch.sigmoid(ema.delta[direction].double()).numpy()),
            "counts": np.histogram(lives[np.isfinite(lives)], edges)[0].tolist(),
        }
        for name, chunk, ema, direction, lives in found
    ]
    return {"edges": edges.tolist(), "rows": rows}


def half_lives(ema: DampedEMA, direction: int) -> np.ndarray:
    """The h with phi^h = 1/2, phi = 1 - alpha delta: (D N,), infinite if a state never decays."""
    return (math.log(0.5) / ema.coefficients(direction).log_decay.double()).flatten().numpy()


def _directions(layer: str, ema: DampedEMA) -> List[str]:
    return [f"{layer} forward", f"{layer} backward"] if ema.bidirectional else [layer]


def _quantiles(values: np.ndarray) -> Dict[str, Optional[float]]:
    """Each is one of the values; None stands for infinity, which JSON cannot represent."""
    ordered = np.sort(values, axis=None)
    chosen = {name: float(ordered[round(share * (ordered.size - 1))]) for name, share in QUANTILES.items()}
    return {name: value if math.isfinite(value) else None for name, value in chosen.items()}


def _edges(values: np.ndarray) -> np.ndarray:
    """Edges of histogram bins, evenly spaced on a logarithmic scale."""
    finite = values[np.isfinite(values)]
    low, high = (finite.min(), finite.max()) if finite.size else (1.0, 1.0)
    return np.geomspace(low, high, BINS + 1) if low < high else np.array([low / 2, high * 2])
