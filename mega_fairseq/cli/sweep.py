"""`mega-fairseq sweep`: perplexity of a trained mega_lm at several chunk sizes and context lengths.

PREFIX.json has the evaluated points, from which an interrupted sweep resumes, and PREFIX.csv the same points.
"""

import argparse
import contextlib
import csv
import hashlib
import io
import json
import math
import os
import re
import sys
import time
from functools import partial
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import torch
from fairseq import utils
from fairseq.data import Dictionary
from fairseq.models import MODEL_REGISTRY
from torch import Tensor, nn
from tqdm import tqdm

from mega_fairseq.cli import UserError, errors_of
from mega_fairseq.cli.checkpoint import trained
from mega_fairseq.cli.checkpoint.build import empty_model, fill, model_options
from mega_fairseq.cli.output import check_prefix, table, write, write_figure, write_json
from mega_fairseq.data.corpus import Corpus, load_dictionary
from mega_fairseq.data.streams import StreamDataset, stream_bounds
from mega_fairseq.models.mega_lm import MegaLanguageModel

TASK = "mega_language_modeling"
OTHER = {"checkpoint": "another checkpoint", "data": "other data or another subset"}
MOST_BITS = 1024  # 2 to this power overflows
LABELS = {"context": "context: tokens in a stream", "chunk": "chunk: tokens that attend to each other"}
# The minimum span of the y axis, so that negligible differences look negligible: in bits, or relative to perplexity.
LEAST = {"bits": 0.1, "perplexity": 0.07}


class Point(NamedTuple):
    """One evaluation of a split: the attention's chunk size, and how the split was cut into streams."""

    chunk: int  # -1: none
    cut: str  # splits:K, size:N, documents:line or documents:blank
    streams: int
    context: int  # tokens of the longest stream
    tokens: int
    bits: Optional[float] = None  # loss to base 2 per token; None if the point could not be evaluated
    perplexity: Optional[float] = None
    seconds: Optional[float] = None
    device: Optional[str] = None
    refused: Optional[str] = None  # why it could not be evaluated


def run(arguments: argparse.Namespace) -> None:
    chunks = None if arguments.chunks is None else numbers("--chunks", arguments.chunks)
    cuts = _cuts(arguments)
    for name, value in (("--max-tokens", arguments.max_tokens), ("--batch-size", arguments.batch_size)):
        if value is not None and value < 1:
            raise UserError(f"{name} is {value}; give a whole number of at least 1")
    check_prefix(arguments.out, (".json", ".csv", ".png"), "points", arguments.force)
    with errors_of(arguments.checkpoint):
        model, origin = load_model(arguments.checkpoint, arguments.cpu)
    split = load_split(arguments.data, arguments.subset)
    most = max(int(cut.split(":")[1]) if cut.startswith("splits") else 1 for cut in cuts)
    if most > len(split.corpus):
        tokens = f"{arguments.subset} only {len(split.corpus):,} tokens"
        raise UserError(f"--streams has {most:,} and {tokens}; give fewer")
    types = len(model.decoder.dictionary)
    if types != len(split.dictionary):
        raise UserError(
            f"{arguments.checkpoint} has {types:,} types and does not fit the {len(split.dictionary):,} types of "
            f"dict.txt in {arguments.data}; give the data that it was trained on"
        )
    measured = partial(measure, model, split, limits=(arguments.max_tokens, arguments.batch_size))
    record = Record(arguments.out, {"checkpoint": origin, "data": split.origin}, arguments.force)
    plan = [(chunk, cut) for chunk in chunks or [model.decoder.cfg.decoder_chunk_size] for cut in cuts]
    _sweep(record, plan, measured, len(split.corpus))
    unit = split.origin["unit"]
    record.write_csv()  # an earlier run may have ended before
    drawn = write_figure(f"{arguments.out}.png", partial(figure, record.points, unit))
    print(results(record.points, unit))
    print("wrote", ", ".join([f"{arguments.out}.json", f"{arguments.out}.csv", *drawn]))


def numbers(option: str, text: str) -> List[int]:
    """Parse numbers separated by commas, without duplicates."""
    words = text.replace(" ", "").split(",")
    if not all(re.fullmatch(r"0*[1-9]\d{0,8}", word) for word in words):
        raise UserError(f"{option} is {text!r}; give whole numbers from 1 to 999,999,999, separated by commas")
    return list(dict.fromkeys(map(int, words)))


def _cuts(arguments: argparse.Namespace) -> List[str]:
    if arguments.contexts is not None:
        return [f"size:{tokens}" for tokens in numbers("--contexts", arguments.contexts)]
    if arguments.documents is not None:
        return [f"documents:{arguments.documents}"]
    return [f"splits:{streams}" for streams in numbers("--streams", arguments.streams)]


def _sweep(record: "Record", plan: Sequence[Tuple[int, str]], measured: Any, tokens: int) -> None:
    """Measure the points of the plan that the record lacks."""
    missing = [point for point in plan if not record.contains(*point)]
    if len(missing) < len(plan):
        print(f"{len(plan) - len(missing)} of {len(plan)} points are in {record.prefix}.json already", file=sys.stderr)
    try:
        with tqdm(total=len(missing) * tokens, unit="token", unit_scale=True, disable=None) as bar:
            for number, (chunk, cut) in enumerate(missing, 1):
                title = f"point {number} of {len(missing)}: chunk {shown(chunk)}, {cut}"
                bar.set_description(title)
                point = measured(chunk, cut, bar=bar)
                record.add(point)
                bar.update(number * tokens - bar.n)  # pads, and what was left of a point that failed
                text = point.refused or f"{point.bits:.4f} bits, perplexity {point.perplexity:.2f}"
                bar.write(f"{title}: {text}", file=sys.stderr)
    except KeyboardInterrupt:
        command = f"the same command{' without --force' * record.force}"
        raise UserError(f"interrupted; {command} continues from {record.prefix}.json") from None
    if not any(record.contains(*point) for point in plan):
        raise UserError(f"no point could be evaluated; the last one: {point.refused}")


def shown(size: int) -> str:
    """A chunk size or a number of tokens, for people."""
    return "none" if size == -1 else f"{size:,}"


def results(points: Sequence[Point], unit: str) -> str:
    """A table of the evaluated points, and a line for each of the others."""
    rows = [["chunk", "streams", "context", f"bits/{unit}", "perplexity", "tokens", "seconds"]]
    lines = []
    for p in points:
        if p.refused is not None:
            lines.append(f"chunk {shown(p.chunk)}, {p.cut} was not evaluated: {p.refused}")
            continue
        sizes = [shown(p.chunk), f"{p.streams:,}", f"{p.context:,}"]
        rows.append([*sizes, f"{p.bits:.4f}", f"{p.perplexity:.2f}", f"{p.tokens:,}", f"{p.seconds:.1f}"])
    return "\n".join([table(rows, left=0), *lines])


# --------------------------------------------------------------------------------------------- data


class Split(NamedTuple):
    """A split of binarised text, and its dictionary."""

    dictionary: Dictionary
    corpus: Corpus
    origin: Dict[str, Any]  # what identifies it in files

    def streams(self, cut: str) -> StreamDataset:
        kind, _, how = cut.partition(":")
        documents = self.corpus.documents(how if kind == "documents" else "stream")
        bounds = stream_bounds("documents" if kind == "documents" else cut, documents)
        return StreamDataset(self.corpus, bounds, self.dictionary.pad(), self.dictionary.eos()).for_scoring()


def load_split(data: str, subset: str) -> Split:
    folder = utils.split_paths(data)[0]
    dictionary = load_dictionary(os.path.join(folder, "dict.txt"))
    corpus = Corpus.load(os.path.join(folder, subset), dictionary, combine=subset == "train")  # as in training
    digest = hashlib.sha256("\n".join(dictionary.symbols).encode())
    for numbers in (*corpus.parts, corpus.lines):
        digest.update(str(numbers.dtype).encode())
        digest.update(numbers)
    origin = {
        "path": data,
        "subset": subset,
        "tokens": len(corpus),
        "unit": unit_of(dictionary),
        "fingerprint": digest.hexdigest(),
    }
    return Split(dictionary, corpus, origin)


def unit_of(dictionary: Dictionary) -> str:
    """`byte` if all types are decimal numbers of bytes, as written by examples/lm/to_bytes.py; otherwise `token`."""
    symbols = [s for s in dictionary.symbols[dictionary.nspecial :] if not s.startswith("madeupword")]
    numbers = all(re.fullmatch(r"\d{1,3}", symbol) and int(symbol) < 256 for symbol in symbols)
    return "byte" if symbols and numbers else "token"


# --------------------------------------------------------------------------------------- evaluating


def load_model(path: str, cpu: bool = True) -> Tuple[MegaLanguageModel, Dict[str, Any]]:
    """The model, on a GPU if there is one, and how a record identifies it."""
    checkpoint = trained.read(path)
    name, task = checkpoint.word("model"), checkpoint.word("task")
    if not issubclass(MODEL_REGISTRY.get(name, object), MegaLanguageModel) or task != TASK:
        raise UserError(
            f"contains the model {name} of the task {task}; give a mega_lm that was trained with --task {TASK}"
        )
    model = fill(empty_model(checkpoint), checkpoint.tensors)
    origin = {"path": path, "model": name, "updates": checkpoint.updates, "fingerprint": _fingerprint(checkpoint)}
    model = model.float().eval()
    return model if cpu or not torch.cuda.is_available() else model.cuda(), origin


def _fingerprint(checkpoint: trained.Checkpoint) -> str:
    """A hash of the model's options and tensors, independent of the file's name and other content."""
    digest = hashlib.sha256(repr(sorted(model_options(checkpoint).items())).encode())
    for name, tensor in sorted(checkpoint.tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


def measure(
    model: MegaLanguageModel, split: Split, chunk: int, cut: str, limits: Tuple[int, Optional[int]], bar: tqdm
) -> Point:
    """Evaluate one point with the numbers of fairseq-eval-lm; one that cannot be evaluated has a reason instead.

    `limits` are the tokens and the streams in a batch.
    """
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

    def count(layer: nn.Module, inputs: Any, output: Tuple[Tensor, Any]) -> None:  # any other value replaces the output
        bar.update(output[0].shape[:2].numel())

    hook = model.decoder.layers[-1].register_forward_hook(count)
    try:
        for batch in batches:
            sample = streams.collater([streams[index] for index in batch])
            inputs = {name: value.to(device) for name, value in sample["net_input"].items()}
            log_probs = model(**inputs)[0].squeeze(-1)  # (B, L)
            total += log_probs.masked_fill(inputs["target"].eq(streams.pad), 0.0).double().sum().item()
    finally:
        hook.remove()
    return total


# -------------------------------------------------------------------------------------------- files


class Record:
    """Points of one checkpoint on one split: those in PREFIX.json, and new ones, which `add` writes at once."""

    def __init__(self, prefix: str, origin: Dict[str, Dict[str, Any]], force: bool = False):
        self.prefix, self.origin, self.force = prefix, origin, force
        self._points = {} if force else self._read()

    def _read(self) -> Dict[Tuple[int, str], Point]:
        """The points in PREFIX.json."""
        path = f"{self.prefix}.json"
        if not os.path.exists(path):
            return {}
        try:
            with open(path) as file:
                content = json.load(file)
            points = [Point(**point) for point in content["points"]]
            other = [part for part in OTHER if content[part]["fingerprint"] != self.origin[part]["fingerprint"]]
            places = [content[part]["path"] for part in other]
        except (KeyError, RecursionError, TypeError, ValueError):
            problem = "was not written by a sweep"
        else:
            if not other:
                return {(point.chunk, point.cut): point for point in points}
            problem = f"contains results of {OTHER[other[0]]} ({places[0]}, compared by content)"
        raise UserError(f"{path} {problem}; give another --out, or --force to replace it")

    @property
    def points(self) -> List[Point]:
        """All points by context length."""
        return sorted(self._points.values(), key=lambda point: (point.context, point.cut, point.chunk))

    def contains(self, chunk: int, cut: str) -> bool:
        """Whether this point was evaluated; a point that could not be evaluated is tried again."""
        return (chunk, cut) in self._points and self._points[chunk, cut].refused is None

    def add(self, point: Point) -> None:
        if self._points or not self.force:  # or the first point replaces the file
            self._points.update(self._read())  # also of a sweep that runs at the same time
        self._points[point.chunk, point.cut] = point
        write_json(self.prefix, {**self.origin, "points": [known._asdict() for known in self.points]})
        with contextlib.suppress(FileNotFoundError):
            os.remove(f"{self.prefix}.png")  # of other points, until the sweep ends
        self.write_csv()

    def write_csv(self) -> None:
        rows = io.StringIO()
        csv.writer(rows, lineterminator="\n").writerows([Point._fields, *self.points])
        write(f"{self.prefix}.csv", rows.getvalue().encode())


def figure(points: Sequence[Point], unit: str) -> Any:
    """Bits or perplexity over context length and over chunk size (paper, figure 6), for evaluated points."""
    from matplotlib.figure import Figure

    points = [point for point in points if point.bits is not None]
    value = "bits" if unit == "byte" else "perplexity"
    varied = [x for x in LABELS if len({getattr(point, x) for point in points}) > 1]
    varied = varied or ["chunk" if points[0].chunk != -1 else "context"]
    drawing = Figure(figsize=(5 * len(varied), 4.2), layout="constrained")
    axes = drawing.subplots(1, len(varied), sharey=True, squeeze=False)[0]
    for axis, x in zip(axes, varied):
        _lines(axis, points, x, "chunk" if x == "context" else "context", value)
    values = [getattr(point, value) for point in points]
    low, high = min(values), max(values)
    least = LEAST[value] * (high if value == "perplexity" else 1.0)
    margin = max(least - (high - low), 0.1 * (high - low)) / 2
    axes[0].set(ylabel="bits per byte" if unit == "byte" else "perplexity", ylim=(low - margin, high + margin))
    return drawing


def _lines(axis: Any, points: Sequence[Point], x: str, line: str, value: str) -> None:
    """`value` over `x`, with one line for each value of `line`."""
    sizes = {getattr(point, x) for point in points}
    places = {size: size if size > 0 else 2 * max(sizes) for size in sizes}  # no chunks: right of the largest
    for each in sorted({getattr(point, line) for point in points}):
        chosen = [point for point in points if getattr(point, line) == each]
        curve = zip(*sorted((places[getattr(point, x)], getattr(point, value)) for point in chosen))
        axis.plot(*curve, marker=".", label=shown(each))
    axis.set(xscale="log", xlabel=LABELS[x])
    axis.minorticks_off()
    axis.set_xticks(list(places.values()), [shown(size) for size in places], rotation=45, fontsize=7)
    axis.legend(title=line, fontsize=7)
    axis.grid(alpha=0.3)
