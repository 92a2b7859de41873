"""Beam search with mega_transformer_base against fairseq's own Transformer base, on one CPU thread.

    python benchmarks/decode.py --json docs/decode.json      all tables, about 40 minutes

Beam 5, random weights, as many target tokens as source tokens, a joined vocabulary of 33,000; encoder and fairseq's
search included.
"""

import sys
from argparse import Namespace
from pathlib import Path
from typing import Iterator, List, Tuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also runs without installation

from fairseq.models import BaseFairseqModel
from fairseq.tasks import FairseqTask

from benchmarks.measure import Meter, Row, Step, main
from benchmarks.models import built

TYPES, BEAM = 33_000, 5
LENGTHS, LONG = [64, 256, 512], 2048
BATCHES, SHORT = [1, 16, 64], 30
CHUNKS = ["--encoder-chunk-size=128", "--decoder-chunk-size=128"]
MODELS = {
    "Transformer": ["--arch=transformer_wmt_en_de"],
    "Mega": ["--arch=mega_transformer_base"],
    "Mega, chunks of 128": ["--arch=mega_transformer_base", *CHUNKS],
}
SMALL = ["--encoder-layers=1", "--decoder-layers=1"]
SENTENCE = ["Transformer", "Mega", "Mega, chunks of 128"]
BATCHED = ["Transformer", "Mega"]


def build(words: List[str], types: int, longest: int) -> Tuple[FairseqTask, BaseFairseqModel]:
    torch.manual_seed(0)
    limits = [f"--max-source-positions={longest + 8}", f"--max-target-positions={longest + 8}"]
    task, model = built(["--task=translation", "--share-all-embeddings", *limits, *words], types)
    return task, model.eval()


def search(task: FairseqTask, model: BaseFairseqModel, length: int, batch: int = 1) -> Step:
    """Translates sentences of `length` tokens into exactly as many, as fairseq-generate does."""
    torch.manual_seed(1)
    device = next(model.parameters()).device
    source = torch.randint(4, len(task.source_dictionary), (batch, length)).to(device)
    sample = {"net_input": {"src_tokens": source, "src_lengths": torch.full((batch,), length, device=device)}}
    model.make_generation_fast_(need_attn=False)
    options = Namespace(beam=BEAM, min_len=length - 1, max_len_a=0, max_len_b=length - 1)
    generator = task.build_generator([model], options)

    def step() -> None:
        hypotheses = task.inference_step(generator, [model], sample)
        assert [h["tokens"].numel() for each in hypotheses for h in each] == [length] * BEAM * batch

    return step


def decode(meter: Meter) -> Iterator[Row]:
    """Beam search of one sentence, beam 5: milliseconds per token, by tokens"""
    types, lengths = (1000, [16]) if meter.quick else (TYPES, [*LENGTHS, LONG])
    models = {name: build([*MODELS[name], *SMALL * meter.quick], types, max(lengths)) for name in SENTENCE}
    for length in lengths:
        steps = {name: search(*model, length) for name, model in models.items()}
        times = meter.seconds(steps) if length < LONG else meter.seconds(steps, 1, warm_up=0)
        yield length, {name: 1000 * time / length for name, time in times.items()}


def batches(meter: Meter) -> Iterator[Row]:
    """Beam search of sentences of 30 tokens, beam 5: sentences per second, by sentences in a batch"""
    types, sizes = (1000, [2]) if meter.quick else (TYPES, BATCHES)
    models = {name: build([*MODELS[name], *SMALL * meter.quick], types, SHORT) for name in BATCHED}
    for batch in sizes:
        steps = {name: search(*model, SHORT, batch) for name, model in models.items()}
        yield batch, {name: batch / time for name, time in meter.seconds(steps).items()}


if __name__ == "__main__":
    main(__doc__, {"decode": decode, "batches": batches})
