"""What a sweep measures, exactly as fairseq-eval-lm does: a trained language model over streams of a split."""

import hashlib
import math
import os
import time
from typing import Any, Dict, List, NamedTuple, Optional

import numpy as np
import torch
from fairseq import utils
from fairseq.checkpoint_utils import load_model_ensemble_and_task
from fairseq.models import MODEL_REGISTRY
from omegaconf import OmegaConf

from mega_fairseq.cli import checkpoint as checkpoints
from mega_fairseq.cli.checkpoint_model import empty_model, fill, options_of
from mega_fairseq.cli.refusal import Refusal
from mega_fairseq.cli.sweep_progress import Progress
from mega_fairseq.cli.sweep_record import Point
from mega_fairseq.data.corpus import Corpus
from mega_fairseq.data.streams import StreamDataset, stream_bounds
from mega_fairseq.models.mega_lm import MegaLanguageModel
from mega_fairseq.tasks.mega_language_modeling import MegaLanguageModelingConfig, MegaLanguageModelingTask

TASK = "mega_language_modeling"
MOST_BITS = 1024  # where two to their power ends


class Split(NamedTuple):
    """The text that all points of a sweep share."""

    task: MegaLanguageModelingTask
    corpus: Corpus
    origin: Dict[str, Any]  # what a record says of it

    def bounds(self, cut: str) -> np.ndarray:
        """Borders of the streams that this cut makes."""
        kind, _, how = cut.partition(":")
        if kind == "documents":
            return stream_bounds("documents", self.corpus.documents(how))
        return stream_bounds(cut, self.corpus.documents("stream"))

    def streams(self, cut: str) -> StreamDataset:
        dictionary = self.task.dictionary
        return StreamDataset(self.corpus, self.bounds(cut), dictionary.pad(), dictionary.eos()).for_scoring()


class Limits(NamedTuple):
    """Of streams side by side, as fairseq-eval-lm has them."""

    max_tokens: int
    batch_size: Optional[int]


class Trained(NamedTuple):
    model: MegaLanguageModel
    origin: Dict[str, Any]


# ------------------------------------------------------------------------------------------------ loading


def load_split(data: str, subset: str) -> Split:
    try:
        task = MegaLanguageModelingTask.setup_task(MegaLanguageModelingConfig(data=data))
        corpus = Corpus.load(os.path.join(utils.split_paths(data)[0], subset), task.dictionary)
    except Exception as error:  # whatever a damaged file makes fairseq's readers stumble over
        raise Refusal(
            _sentence(error, f"{data} with --subset {subset} cannot be read", "run fairseq-preprocess again")
        ) from None
    found = hashlib.sha256("\n".join(task.dictionary.symbols).encode())
    for numbers in (*corpus.parts, corpus.lines):
        found.update(str(numbers.dtype).encode())
        found.update(numbers)
    origin = {"path": data, "subset": subset, "tokens": len(corpus), "fingerprint": found.hexdigest()}
    return Split(task, corpus, origin)


def load_model(path: str, split: Split, device: torch.device) -> Trained:
    checkpoint = checkpoints.read(path)
    name, task = checkpoint.word("model"), checkpoint.word("task")
    if not issubclass(MODEL_REGISTRY.get(name, object), MegaLanguageModel) or task != TASK:
        raise Refusal(
            f"{path} is of the model {name} and the task {task}; give a mega_lm that was trained with --task {TASK}"
        )
    tensors, updates = checkpoint.tensors, checkpoint.updates
    try:
        options = options_of(checkpoint)
        fill(empty_model(checkpoint), tensors)  # what does not fit is refused before it takes any memory
    except Refusal as refusal:
        raise Refusal(f"{path} {refusal}") from None
    origin = {"path": path, "model": name, "updates": updates, "fingerprint": _fingerprint(options, tensors)}
    cfg = OmegaConf.create({"model": {"_name": name, **options}})
    state = {"cfg": cfg, "model": tensors, "optimizer_history": [{"num_updates": updates}]}
    try:
        ((model,), _, _) = load_model_ensemble_and_task([path], task=split.task, state=state)
    except ValueError as error:
        raise Refusal(_sentence(error, f"{path} makes no model", "give another checkpoint")) from None
    return Trained(model.eval().to(device), origin)


def choose_device(cpu: bool) -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() and not cpu else "cpu")


def _fingerprint(options: Dict[str, Any], tensors: Dict[str, torch.Tensor]) -> str:
    """Of the model alone: its options and tensors, wherever the file lies and whatever else is in it."""
    found = hashlib.sha256(repr(sorted(options.items())).encode())
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.reshape(-1).contiguous().view(torch.uint8).numpy())
    return found.hexdigest()


def _sentence(error: Exception, otherwise: str, remedy: str) -> str:
    """The error's own words where they are a sentence of ours, with a remedy."""
    words = " ".join(str(error).split())
    own = isinstance(error, (ValueError, FileNotFoundError)) and ";" in words
    return words if own else f"{otherwise} ({type(error).__name__}); {remedy}"


# --------------------------------------------------------------------------------------------- evaluating


def measure(model: MegaLanguageModel, split: Split, chunk: int, cut: str, limits: Limits, progress: Progress) -> Point:
    """One point; where it cannot be had, the reason in place of its numbers."""
    streams, device = split.streams(cut), next(model.parameters()).device
    point = Point(chunk, cut, len(streams), int(streams.sizes.max()), int(streams.sizes.sum()))
    try:
        model.decoder.set_chunk_size(chunk)
    except ValueError as error:
        return point._replace(refused=str(error))
    started = time.perf_counter()
    try:
        total = score(model, streams, streams.batch_by_size(streams.ordered_indices(), *limits), progress)
    except torch.cuda.OutOfMemoryError:
        return point._replace(refused="the GPU ran out of memory; give a smaller --max-tokens, or --cpu")
    seconds, bits = time.perf_counter() - started, -total / point.tokens / math.log(2)
    if not bits < MOST_BITS:  # NaN is not below it either
        return point._replace(
            refused=f"the loss is {bits:.4g} bits per token: the model has diverged; take an earlier one"
        )
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return point._replace(bits=bits, perplexity=2**bits, seconds=seconds, device=name)


@torch.no_grad()
def score(model: MegaLanguageModel, streams: StreamDataset, batches: List[List[int]], progress: Progress) -> float:
    """The log-probability of all tokens, each number of a token a float32, their sum a float64."""
    device, layer = next(model.parameters()).device, model.decoder.layers[-1]
    total = 0.0
    for batch in batches:
        sample = streams.collater([streams[index] for index in batch])
        inputs = {name: value.to(device) for name, value in sample["net_input"].items()}
        with progress.batch(layer, sample["ntokens"]):
            log_probs = model(**inputs)[0].squeeze(-1)  # (B, L)
        total += log_probs.masked_fill(inputs["target"].eq(streams.pad), 0.0).double().sum().item()
    return total
