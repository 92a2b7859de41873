"""Evaluating language models against fairseq's transformer_lm of the same size, on one CPU thread.

    python benchmarks/eval_lm.py --json docs/eval_lm.json      all tables, about 30 minutes

Random weights and tokens distributed like words. Mega reads them as one stream, the Transformer with the sliding window
of fairseq's documentation: samples of 512 tokens, of which 400 are context. Memory is that above the weights.
"""

import sys
import time
from pathlib import Path
from typing import Any, Dict, Iterator, List, Tuple

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also runs without installation

from fairseq.data import Dictionary, ListDataset, LMContextWindowDataset, MonolingualDataset, TokenBlockDataset
from fairseq_cli.eval_lm import eval_lm

from benchmarks import quality_lm
from benchmarks.measure import Meter, Row, main, peak_mib
from benchmarks.models import TRANSFORMERS, TYPES, from_args, like_words
from mega_fairseq.data import Corpus, StreamDataset

WINDOW, CONTEXT = 512, 400
CHUNKS = (1024, 2048)
MEGA = ["--task=mega_language_modeling"]

# The batches that the task's eval_lm_dataloader yields for one sequence of tokens:


def as_stream(words: Dictionary, tokens: Tensor) -> List[Dict[str, Any]]:
    """One batch with the whole sequence."""
    corpus = Corpus([tokens.numpy()], np.array([len(tokens)]))
    streams = StreamDataset(corpus, np.array([0, len(tokens)]), words.pad(), words.eos()).for_scoring()
    return [streams.collater([streams[0]])]


def as_windows(words: Dictionary, tokens: Tensor) -> List[Dict[str, Any]]:
    """Samples of up to WINDOW tokens; the first CONTEXT of them were scored before."""
    lines = ListDataset([tokens], np.array([len(tokens)]))
    size = WINDOW - CONTEXT  # eval-lm subtracts the context from the samples, and the window adds it
    blocks = TokenBlockDataset(lines, lines.sizes, size, words.pad(), words.eos(), include_targets=True)
    samples = MonolingualDataset(blocks, blocks.sizes, words, words, targets=["future"], shuffle=False)
    windows = LMContextWindowDataset(samples, size, CONTEXT, words.pad())
    return [windows.collater([windows[i] for i in rows.tolist()]) for rows in torch.arange(len(windows)).split(16)]


def evaluate(words: List[str], types: int, count: int, windows: bool) -> Tuple[float, float]:
    """Tokens per second and peak MiB of fairseq's eval_lm over `count` tokens."""
    torch.manual_seed(0)
    model, tokens, seconds = from_args(words, types).eval(), like_words(types, count), []
    text = model.decoder.dictionary
    batches, few = (
        as_windows(text, some) if windows else as_stream(text, some.int()) for some in (tokens, tokens[:WINDOW])
    )
    softmax_batch = 256 if windows else 0  # tokens: a batch of 8,192 would take 9 GB of scores at once

    @torch.no_grad()
    def step(batches: List[Dict[str, Any]] = batches) -> None:
        start = time.process_time()
        scores = eval_lm([model], text, iter(batches), target_dictionary=text, softmax_batch=softmax_batch)
        seconds.append(time.process_time() - start)
        assert scores["loss"] > 0

    step(few)  # the first call imports parts of torch
    mib = peak_mib(step)
    return count / seconds[-1], mib


def compared(case: str, models: Dict[str, List[str]], types: int, meter: Meter) -> Iterator[Row]:
    """Two rows: speed and memory of each model, in a new process each."""
    measured = {}
    for name, words in models.items():
        windows = "transformer" in name.lower()
        count = 600 if meter.quick else 4096 if windows else 16_384
        measured[name] = meter.apart(evaluate, words, types, count, windows)
    for unit, numbers in zip(("tokens per second", "MiB"), zip(*measured.values())):
        yield f"{case}{unit}", dict(zip(measured, numbers))


def evaluation(meter: Meter) -> Iterator[Row]:
    """fairseq-eval-lm: tokens per second, and peak MiB above the weights"""
    small = ["--decoder-layers=1"] if meter.quick else []
    for shape in ["enwik8"] if meter.quick else TYPES:
        limits = [f"--tokens-per-sample={WINDOW}", f"--max-target-positions={WINDOW}"]
        models = {"Transformer": [*TRANSFORMERS[shape], *limits, *small]}
        for chunk in CHUNKS:
            words = [*MEGA, f"--arch=mega_lm_{shape}", f"--decoder-chunk-size={chunk}"]
            models[f"Mega, chunks of {chunk:,}"] = [*words, *small]
        yield from compared(f"{shape}, ", models, TYPES[shape], meter)


def mixers(meter: Meter) -> Iterator[Row]:
    """fairseq-eval-lm on the language models of quality_lm.py: tokens per second, and peak MiB above the weights"""
    models = {name: quality_lm.MODELS[name] for name in quality_lm.COMPARED}
    yield from compared("", models, TYPES["enwik8"], meter)


if __name__ == "__main__":
    main(__doc__, {"evaluation": evaluation, "mixers": mixers})
