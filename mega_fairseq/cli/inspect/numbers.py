"""The content of PREFIX.json: plain values that describe a checkpoint."""

import math
from collections import Counter
from dataclasses import fields
from typing import Any, Dict, List, Optional

import numpy as np
import torch
from torch import Tensor, nn

from mega_fairseq.cli.checkpoint import untrusted
from mega_fairseq.cli.checkpoint.build import empty_model, fill, stacks
from mega_fairseq.cli.checkpoint.trained import Checkpoint
from mega_fairseq.cli.inspect.curves import QUANTILES, curves
from mega_fairseq.cli.inspect.memory import memory
from mega_fairseq.cli.split import Split
from mega_fairseq.models import MegaClassifier
from mega_fairseq.modules import MIXERS, MixerConfig
from mega_fairseq.modules.description import Decays
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
BINS = 60
# Tokens. The EMA limits its logits, so the half-life of a state that does not decay is log(2) exp(limit) or more.
NEVER = 0.99 * math.log(2) * math.exp(LARGEST_LOGIT)


@torch.no_grad()
def numbers_of(checkpoint: Checkpoint, text: Optional[Split] = None) -> Numbers:
    """Plain values, ready for JSON. Memories that depend on a text are those after this one."""
    model = empty_model(checkpoint)
    parameters = _parameters(model)  # before `fill`, which gives tied parameters separate tensors
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}  # in the optimizer's order
    fill(model, checkpoint.tensors)
    untrusted.check_finite(checkpoint.tensors)
    return {
        "architecture": _architecture(checkpoint, model),
        "parameters": parameters,
        "half_lives": _half_lives(model),
        "curves": curves(checkpoint, stacks(model), shapes),
        "memory": memory(model, text),  # changes the model's precision, so it comes last
    }


# ------------------------------------------------------------------------------------------ architecture


def _architecture(checkpoint: Checkpoint, model: nn.Module) -> Numbers:
    dtypes = Counter(str(tensor.dtype).split(".")[-1] for tensor in checkpoint.tensors.values())
    return {
        "model": checkpoint.word("model"),
        "task": checkpoint.word("task"),
        "source": checkpoint.word("task", "source_lang"),
        "target": checkpoint.word("task", "target_lang"),
        **{side: _stack(stack) for side, stack in stacks(model)},
        "head": _classes(model) if isinstance(model, MegaClassifier) else _softmax(model.decoder),
        "updates": checkpoint.updates,
        "epoch": _epoch(checkpoint),
        "criterion": checkpoint.word("criterion"),
        "metric": checkpoint.word("checkpoint", "best_checkpoint_metric"),
        "best": checkpoint.number("best"),
        "stored_as": dtypes.most_common(1)[0][0],
        "trained_in": [name for name in ("fp16", "bf16", "amp") if checkpoint.cfg.get("common", {}).get(name) is True],
    }


def _epoch(checkpoint: Checkpoint) -> Optional[float]:
    """The epoch of the last update; at an epoch's end fairseq stores the number of the next."""
    epoch, batches = (checkpoint.number("train_iterator", name) for name in ("epoch", "iterations_in_epoch"))
    return epoch if epoch is None or batches else epoch - 1


def _stack(stack: nn.Module) -> Numbers:
    """Sizes by the paper's symbols, and the options that only this kind of mixer has, by name; without unused ones."""
    layer = stack.layers[0]
    c, feed_forward = layer.mixer.config, layer.feed_forward
    used = [f for f in fields(c) if not c.is_unused(f.name)]
    symbols = {f.metadata["symbol"]: getattr(c, f.name) for f in used if f.metadata.get("symbol")}
    common = {f.name for f in fields(MixerConfig)}
    own = {f.name: getattr(c, f.name) for f in used if f.name not in common and not f.metadata.get("symbol")}
    return {
        "vocabulary": None if stack.dictionary is None else len(stack.dictionary),
        "layers": len(stack.layers),
        "feed_forward": None if feed_forward is None else feed_forward.config.hidden_dim,
        "sizes": symbols,
        "mixer": next(name for name, kind in MIXERS.items() if type(c) is kind),
        "options": own,
        "norm": c.norm,
        "prenorm": c.prenorm,
    }


def _classes(model: MegaClassifier) -> str:
    heads = [f"{head.out.out_features} classes" for head in model.classification_heads.values()]
    pooling = {"mean": "of the mean over positions", "first": "of the first position"}[str(model.cfg.pooling)]
    return f"{' and '.join(heads)}, {pooling}{' of both inputs' if model.cfg.pairs else ''}"


def _softmax(decoder: nn.Module) -> str:
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


# -------------------------------------------------------------------------------------------- half-lives


def _half_lives(model: nn.Module) -> Numbers:
    """The number of tokens after which half of a state is left, for the states of each layer and direction."""
    found = [
        (f"{side} layer {i} {learned.direction}".strip(), layer.mixer.config.chunk_size, learned)
        for side, stack in stacks(model)
        for i, layer in enumerate(stack.layers)
        for learned in layer.mixer.describe(most=1)
        if isinstance(learned, Decays)
    ]
    lives = [half_lives(learned.log_decay) for *_, learned in found]
    finite = np.concatenate([np.empty(0), *(values[np.isfinite(values)] for values in lives)])
    low, high = (finite.min(), finite.max()) if finite.size else (1.0, 1.0)
    edges = np.geomspace(low, max(high, 2 * low), BINS + 1)  # for a logarithmic scale
    rows = [
        {
            "name": name,
            "chunk": chunk,
            **_quantiles(values),
            "beyond_chunk": None if chunk is None else float((values > chunk).mean()),
            "alpha": _quantiles(learned.alpha.double().numpy()),
            "delta": _quantiles(learned.delta.double().numpy()),
            "counts": np.histogram(values[np.isfinite(values)], edges)[0].tolist(),
        }
        for (name, chunk, learned), values in zip(found, lives)
    ]
    return {"edges": edges.tolist(), "rows": rows}


def half_lives(log_decay: Tensor) -> np.ndarray:
    """The h with decay^h = 1/2 for each state; infinite if a state never decays."""
    found = (math.log(0.5) / log_decay.double()).flatten().numpy()
    return np.where(found < NEVER, found, np.inf)


def _quantiles(values: np.ndarray) -> Dict[str, Optional[float]]:
    """Each quantile is one of the values; None means infinity, which JSON cannot represent."""
    ordered = np.sort(values, axis=None)
    chosen = {name: float(ordered[round(share * (ordered.size - 1))]) for name, share in QUANTILES.items()}
    return {name: value if math.isfinite(value) else None for name, value in chosen.items()}
