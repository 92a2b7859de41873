"""mega_encoder_base against fairseq's RoBERTa base: two layers of each, one sequence, on one CPU thread.

    python benchmarks/encoder.py --json docs/encoder.json      both tables, about 5 minutes

Random weights and tokens, dropout as in training; 15% of the tokens are scored, over 8,000 types. Backward of RoBERTa
at 8,192 tokens needs more than 23 GB.
"""

import sys
from pathlib import Path
from typing import Iterator

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also runs without installation

from benchmarks.measure import Meter, Row, Step, main
from benchmarks.models import from_args

TYPES, LENGTHS = 8000, [512, 2048, 8192]
MODELS = {"RoBERTa": "roberta_base", "Mega": "mega_encoder_base"}
TOO_LONG = ("RoBERTa", 8192)  # to train


def forward(meter: Meter, train: bool = False) -> Iterator[Row]:
    """Forward: tokens per CPU second, by tokens of the sequence"""
    for length in [32] if meter.quick else LENGTHS:
        fitting = [name for name in MODELS if not train or (name, length) != TOO_LONG]
        times = meter.seconds({name: step(MODELS[name], length, train) for name in fitting})
        yield length, {name: length / time for name, time in times.items()}


def training(meter: Meter) -> Iterator[Row]:
    """Forward and backward: tokens per CPU second, by tokens of the sequence"""
    return forward(meter, train=True)


def step(arch: str, length: int, train: bool) -> Step:
    torch.manual_seed(0)
    words = ["--task=masked_lm", f"--tokens-per-sample={length}", f"--arch={arch}", "--encoder-layers=2"]
    model = from_args([*words, f"--max-positions={length}"], TYPES).train(train)
    tokens, masked = torch.randint(4, TYPES, (1, length)), torch.rand(1, length) < 0.15

    def step() -> None:
        with torch.set_grad_enabled(train):
            scores = model(src_tokens=tokens, masked_tokens=masked)[0]
            if train:
                scores.sum().backward()

    return step


if __name__ == "__main__":
    main(__doc__, {"forward": forward, "training": training})
