"""Evaluate a trained language model on streams of a split, with the same numbers as fairseq-eval-lm."""

import hashlib
import math
import time
from typing import Any, Dict, List, Optional, Tuple

import numpy as np
import torch
from fairseq.models import MODEL_REGISTRY
from tqdm import tqdm

from mega_fairseq.cli import UserError
from mega_fairseq.cli.checkpoint import trained
from mega_fairseq.cli.checkpoint.build import empty_model, fill, model_options
from mega_fairseq.cli.split import Split
from mega_fairseq.cli.sweep.record import Point
from mega_fairseq.data.streams import StreamDataset
from mega_fairseq.models.mega_lm import MegaLanguageModel
from mega_fairseq.ops.sequence_parallel import SequenceGroup

TASK = "mega_language_modeling"
Limits = Tuple[int, Optional[int]]  # tokens and streams in a batch
MOST_BITS = 1024  # 2 to this power overflows


def load_model(
    path: str, split: Split, cpu: bool = True, group: Optional[SequenceGroup] = None
) -> Tuple[MegaLanguageModel, Dict[str, Any]]:
    """The model, on a GPU if there is one, and how a record identifies it; the processes of `group` share streams."""
    checkpoint = trained.read(path)
    name, task = checkpoint.word("model"), checkpoint.word("task")
    if not issubclass(MODEL_REGISTRY.get(name, object), MegaLanguageModel) or task != TASK:
        raise UserError(
            f"contains the model {name} of the task {task}; give a mega_lm that was trained with --task {TASK}"
        )
    model = fill(empty_model(checkpoint), checkpoint.tensors)
    split.check_types(model)
    origin = {"path": path, "model": name, "updates": checkpoint.updates, "fingerprint": _fingerprint(checkpoint)}
    model = model.float().eval()
    model.decoder.group = group  # whether it can be shared depends on the chunk size of each point
    return model if cpu or not torch.cuda.is_available() else model.cuda(), origin


def _fingerprint(checkpoint: trained.Checkpoint) -> str:
    """A hash of the model's options and tensors, independent of the file's name and other content."""
    found = hashlib.sha256(repr(sorted(model_options(checkpoint).items())).encode())
    for name, tensor in sorted(checkpoint.tensors.items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.reshape(-1).contiguous().view(torch.uint8).numpy())
    return found.hexdigest()


def measure(model: MegaLanguageModel, split: Split, chunk: int, cut: str, limits: Limits, bar: tqdm) -> Point:
    """Evaluate one point; a point that cannot be evaluated has a reason instead of numbers."""
    streams, device = split.streams(cut), next(model.parameters()).device
    point = Point(chunk, cut, len(streams), int(streams.sizes.max()), int(streams.sizes.sum()))
    try:
        model.decoder.set_chunk_size(chunk)
    except ValueError as error:
        return point._replace(refused=str(error))
    started = time.perf_counter()
    try:
        batches = streams.batch_by_size(streams.ordered_indices(), *limits)
        total = score(model, streams, batches, bar)
    except torch.cuda.OutOfMemoryError:
        if model.decoder.group is not None:
            raise  # the others wait for this process
        return point._replace(refused="the GPU ran out of memory; give a smaller --max-tokens, or --cpu")
    seconds, bits = time.perf_counter() - started, -total / point.tokens / math.log(2)
    if not bits < MOST_BITS:  # true for NaN
        return point._replace(
            refused=f"the loss is {bits:.4g} bits per token: the model has diverged; give an earlier checkpoint"
        )
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return point._replace(bits=bits, perplexity=2**bits, seconds=seconds, device=name)


@torch.no_grad()
def score(model: MegaLanguageModel, streams: StreamDataset, batches: List[np.ndarray], bar: tqdm) -> float:
    """The log-probability of all tokens: float32 for each token, summed in float64."""
    device, total = next(model.parameters()).device, 0.0
    # A stream may be the whole split, so the bar counts the tokens of each piece that the last layer has processed.
    processes = 1 if model.decoder.group is None else model.decoder.group.size
    hook = model.decoder.layers[-1].register_forward_hook(
        lambda _, __, y: bar.update(processes * y[0].shape[:2].numel())
    )
    try:
        for batch in batches:
            sample = streams.collater([streams[index] for index in batch])
            inputs = {name: value.to(device) for name, value in sample["net_input"].items()}
            log_probs = model(**inputs)[0].squeeze(-1)  # (B, L)
            total += log_probs.masked_fill(inputs["target"].eq(streams.pad), 0.0).double().sum().item()
    finally:
        hook.remove()
    return total
