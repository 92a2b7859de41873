"""Evaluate a trained language model on streams of a split, with the same numbers as fairseq-eval-lm."""

import hashlib
import math
import os
import re
import time
from glob import escape, glob
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import numpy as np
import torch
from fairseq import utils
from fairseq.data import Dictionary
from fairseq.models import MODEL_DATACLASS_REGISTRY, MODEL_REGISTRY

from mega_fairseq.cli import UserError
from mega_fairseq.cli.checkpoint import trained
from mega_fairseq.cli.checkpoint.build import empty_model, fill, model_options
from mega_fairseq.cli.sweep.progress import Progress
from mega_fairseq.cli.sweep.record import Point
from mega_fairseq.data.corpus import Corpus
from mega_fairseq.data.streams import StreamDataset, stream_bounds
from mega_fairseq.models.mega_lm import MegaLanguageModel
from mega_fairseq.tasks.mega_language_modeling import MegaLanguageModelingConfig, MegaLanguageModelingTask

TASK = "mega_language_modeling"
MOST_BITS = 1024  # 2 to this power overflows
PREPARE = "give a folder that fairseq-preprocess --only-source wrote"


class Split(NamedTuple):
    """The text that all points of a sweep share."""

    task: MegaLanguageModelingTask
    corpus: Corpus
    origin: Dict[str, Any]  # how a record identifies it

    def bounds(self, cut: str) -> np.ndarray:
        """Where the streams of this cut begin, and the end of the last."""
        kind, _, how = cut.partition(":")
        if kind == "documents":
            return stream_bounds("documents", self.corpus.documents(how))
        return stream_bounds(cut, self.corpus.documents("stream"))

    def streams(self, cut: str) -> StreamDataset:
        dictionary = self.task.dictionary
        return StreamDataset(self.corpus, self.bounds(cut), dictionary.pad(), dictionary.eos()).for_scoring()


class Limits(NamedTuple):
    """Batch sizes, as in fairseq-eval-lm."""

    max_tokens: int
    batch_size: Optional[int]


# ------------------------------------------------------------------------------------------------ loading


def load_split(data: str, subset: str) -> Split:
    folder = utils.split_paths(data)[0]
    if not os.path.exists(os.path.join(folder, "dict.txt")):
        pair = sorted(map(os.path.basename, glob(os.path.join(escape(folder), "dict.*.txt"))))
        if pair:
            raise UserError(
                f"{data} contains a translation corpus ({', '.join(pair)}) and sweep evaluates language models; "
                f"{PREPARE}"
            )
        raise UserError(f"there is no {os.path.join(folder, 'dict.txt')}; {PREPARE}")
    try:
        task = MegaLanguageModelingTask.setup_task(MegaLanguageModelingConfig(data=data))
        corpus = Corpus.load(os.path.join(folder, subset), task.dictionary)
    except Exception as error:  # fairseq's readers raise anything for damaged files
        raise UserError(
            _sentence(error, f"{data} with --subset {subset} cannot be read", "run fairseq-preprocess again")
        ) from None
    found = hashlib.sha256("\n".join(task.dictionary.symbols).encode())
    for numbers in (*corpus.parts, corpus.lines):
        found.update(str(numbers.dtype).encode())
        found.update(numbers)
    origin = {
        "path": data,
        "subset": subset,
        "tokens": len(corpus),
        "unit": unit_of(task.dictionary),
        "fingerprint": found.hexdigest(),
    }
    return Split(task, corpus, origin)


def unit_of(dictionary: Dictionary) -> str:
    """`byte` if all tokens are the decimal numbers of bytes, as examples/lm/to_bytes.py writes them, else `token`."""
    symbols = [s for s in dictionary.symbols[dictionary.nspecial :] if not s.startswith("madeupword")]
    numbers = all(re.fullmatch(r"\d{1,3}", symbol) and int(symbol) < 256 for symbol in symbols)
    return "byte" if symbols and numbers else "token"


def load_model(path: str, split: Split, device: torch.device) -> Tuple[MegaLanguageModel, Dict[str, Any]]:
    """The model, and how a record identifies it."""
    checkpoint = trained.read(path)
    name, task = checkpoint.word("model"), checkpoint.word("task")
    if not issubclass(MODEL_REGISTRY.get(name, object), MegaLanguageModel) or task != TASK:
        raise UserError(
            f"{path} contains the model {name} of the task {task}; give a mega_lm that was trained with --task {TASK}"
        )
    try:
        options = model_options(checkpoint)
        fill(empty_model(checkpoint), checkpoint.tensors)  # checks that they fit before memory is allocated
    except UserError as error:
        raise UserError(f"{path} {error}") from None
    origin = {"path": path, "model": name, "updates": checkpoint.updates}
    origin["fingerprint"] = _fingerprint(options, checkpoint.tensors)
    try:
        model = MODEL_REGISTRY[name].build_model(MODEL_DATACLASS_REGISTRY[name](**options), split.task)
        model.load_state_dict(checkpoint.tensors)
    except ValueError as error:
        raise UserError(_sentence(error, f"{path} cannot be loaded", "give another checkpoint")) from None
    return model.eval().to(device), origin


def choose_device(cpu: bool) -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() and not cpu else "cpu")


def _fingerprint(options: Dict[str, Any], tensors: Dict[str, torch.Tensor]) -> str:
    """A hash of the model's options and tensors, independent of the file's name and other content."""
    found = hashlib.sha256(repr(sorted(options.items())).encode())
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.reshape(-1).contiguous().view(torch.uint8).numpy())
    return found.hexdigest()


def _sentence(error: Exception, otherwise: str, remedy: str) -> str:
    """The error's own message if it is one of this package, which has a remedy; else these words."""
    words = " ".join(str(error).split())
    own = isinstance(error, (ValueError, FileNotFoundError)) and ";" in words
    return words if own else f"{otherwise} ({type(error).__name__}); {remedy}"


# --------------------------------------------------------------------------------------------- evaluating


def measure(model: MegaLanguageModel, split: Split, chunk: int, cut: str, limits: Limits, progress: Progress) -> Point:
    """Evaluate one point; a point that cannot be evaluated has a reason in place of numbers."""
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
    if not bits < MOST_BITS:  # true for NaN
        return point._replace(
            refused=f"the loss is {bits:.4g} bits per token: the model has diverged; give an earlier checkpoint"
        )
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return point._replace(bits=bits, perplexity=2**bits, seconds=seconds, device=name)


@torch.no_grad()
def score(model: MegaLanguageModel, streams: StreamDataset, batches: List[List[int]], progress: Progress) -> float:
    """The log-probability of all tokens: float32 for each token, summed in float64."""
    device, layer = next(model.parameters()).device, model.decoder.layers[-1]
    total = 0.0
    for batch in batches:
        sample = streams.collater([streams[index] for index in batch])
        inputs = {name: value.to(device) for name, value in sample["net_input"].items()}
        with progress.batch(layer, sample["ntokens"]):
            log_probs = model(**inputs)[0].squeeze(-1)  # (B, L)
        total += log_probs.masked_fill(inputs["target"].eq(streams.pad), 0.0).double().sum().item()
    return total
