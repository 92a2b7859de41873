"""Times and memory on a GPU: layers beside torch's, whole models beside fairseq's Transformers of the same size.

Each measurement yields rows with a number for each contender, as they are measured. Modules and inputs are created with
the device as torch's current one. Nothing runs like that: each call of torch would take longer, and Adam would wait.
"""

import time
from typing import Any, Callable, Dict, Iterator

import torch
from fairseq.models import BaseFairseqModel

from benchmarks import contenders as c
from benchmarks import decode, mixers, train
from benchmarks.measure import peak_mib, seconds
from benchmarks.models import from_args, task

TOKENS, LENGTHS = 65_536, [512, 2048, 8192, 65_536]  # of a step of one layer
QUADRATIC = 8192  # the longest input of layers with full attention
TRAINED = 32_768  # tokens of a training step
DECODED = [64, 256]
BATCHES = [1, 16, 64, 256]
DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}
MODELS = {"transformer": decode.transformer, "mega": decode.mega}
TRANSLATED = {"float32": torch.float32, "float16": torch.float16}  # fairseq-generate has no --bf16
Rows = Iterator[Dict[str, Any]]


class Measurement:
    """What is measured on a device: lengths and numbers of repetitions, clock and memory."""

    def __init__(self, device: torch.device, quick: bool):
        self.device, self.quick = device, quick
        self.tokens, self.lengths, self.trained = TOKENS, LENGTHS, TRAINED
        self.decoded, self.names, self.tables = DECODED, ["torch", *mixers.LAYERS], ["base", "language"]
        self.batches = BATCHES
        if quick:
            self.tokens, self.lengths, self.trained, self.decoded = 128, [128], 128, [8]
            self.names, self.tables = ["torch", "Mega, chunks", "FLASH"], ["small"]
            self.batches = [2]

    def clock(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def seconds(self, steps: Dict[str, Callable[[], None]], repeats: int = 3) -> Dict[str, float]:
        return seconds(steps, 1 if self.quick else repeats, clock=self.clock)

    def peak_mib(self, step: Callable[[], None]) -> float:
        if self.device.type != "cuda":
            return peak_mib(step)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return (torch.cuda.max_memory_allocated() - before) / 2**20

    def layer_steps(self, length: int, dtype: torch.dtype) -> Dict[str, Callable[[], None]]:
        fitting = [name for name in self.names if length <= QUADRATIC or name not in mixers.QUADRATIC]
        with self.device:
            modules = {name: mixers.layer(name).to(dtype) for name in fitting}
            return {n: c.training_step(m, max(1, self.tokens // length), length, dtype) for n, m in modules.items()}

    def searches(self, models: Dict[str, BaseFairseqModel], length: int, batch: int) -> Dict[str, Callable[[], None]]:
        with self.device:
            return {name: decode.generation(model, length, batch) for name, model in models.items()}


def row(case: str, numbers: Dict[str, float]) -> Dict[str, Any]:
    return {"case": case, "numbers": numbers}


def speed(of: Measurement) -> Rows:
    """One layer, forward and backward: tokens per second"""
    for dtype in DTYPES:
        for length in of.lengths:
            times = of.seconds(of.layer_steps(length, DTYPES[dtype]))
            count = max(of.tokens, length)
            yield row(f"{length:,} tokens, {dtype}", {name: count / t for name, t in times.items()})


def memory(of: Measurement) -> Rows:
    """One layer, forward and backward: peak MiB"""
    for length in of.lengths:
        found = of.layer_steps(length, torch.float32)
        for step in found.values():
            step()  # allocates what libraries keep
        yield row(f"{length:,} tokens", {name: of.peak_mib(step) for name, step in found.items()})


def steps(of: Measurement) -> Rows:
    """Training steps of whole models: tokens per second"""
    for name in of.tables:
        table = train.TABLES[name]
        for dtype in DTYPES:
            with of.device:
                models = {n: from_args(words, table.types).train() for n, words in table.models.items()}
            for length in [min(table.lengths[-1], of.trained)] if of.quick else table.lengths:
                with of.device:
                    built = {n: train.training(m.to(DTYPES[dtype]), length, of.trained) for n, m in models.items()}
                count = of.trained // length * length
                yield row(f"{name}, {length:,} tokens, {dtype}", {n: count / t for n, t in of.seconds(built).items()})


def decoding(of: Measurement) -> Rows:
    """Beam search of one sentence, beam 5: milliseconds per token"""
    words = task(1000 if of.quick else decode.VOCABULARY)
    with of.device:
        models = decode.contenders(words, max(of.decoded) + 8)
    for length in of.decoded:
        times = of.seconds(of.searches(models, length, 1), 2)
        yield row(f"{length:,} tokens", {name: 1000 * t / length for name, t in times.items()})


def batches(of: Measurement) -> Rows:
    """Beam search of batches of sentences of 30 tokens, beam 5: sentences per second"""
    words = task(1000 if of.quick else decode.VOCABULARY)
    for name, dtype in TRANSLATED.items():
        with of.device:
            models = {n: model(words, 64).to(dtype) for n, model in MODELS.items()}
        for batch in of.batches:
            times = of.seconds(of.searches(models, decode.SHORT, batch), 3)
            yield row(f"batch {batch}, {name}", {n: batch / t for n, t in times.items()})


MEASURED = {table.__name__: table for table in (speed, memory, steps, decoding, batches)}
