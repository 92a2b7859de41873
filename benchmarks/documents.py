"""Time and memory against the length of windows: the models of quality_documents.py, on one CPU thread.

    python benchmarks/documents.py --json docs/documents.json      all tables, about 40 minutes
    python benchmarks/documents.py --plot docs/documents.json      only draws

Random weights and tokens, targets as long as sources. The Transformer is measured up to 4,096 tokens: its memory grows
with the square, and for its weights of cross attention fairseq's search copies beam x target x source numbers a token.
"""

import sys
from pathlib import Path
from typing import Dict, Iterator, List

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also runs without installation

from benchmarks import decode, train
from benchmarks.measure import Meter, Row, main
from benchmarks.quality_documents import SYSTEMS

TYPES, LENGTHS = 3912, [256, 512, 1024, 2048, 4096, 8192]
TRANSFORMER, LONGEST = "Transformer", 4096


def models(length: int) -> Dict[str, List[str]]:
    """Those that are measured at this length."""
    both = {TRANSFORMER: SYSTEMS["transformer"], "Mega, chunks of 128": SYSTEMS["mega"]}
    limits = [f"--max-source-positions={length}", f"--max-target-positions={length}"]
    return {name: [*words, *limits] for name, words in both.items() if name != TRANSFORMER or length <= LONGEST}


def trained(length: int) -> Dict[str, List[str]]:
    dropout = {TRANSFORMER: train.DROPOUT}
    return {n: [*words, *train.TRANSLATION, *dropout.get(n, train.MEGA)] for n, words in models(length).items()}


def lengths(meter: Meter) -> List[int]:
    return [32] if meter.quick else LENGTHS


def speed(meter: Meter) -> Iterator[Row]:
    """Training step: tokens per CPU second, by tokens per window"""
    for length in lengths(meter):
        tokens = max(lengths(meter)[-1] // 2, length)
        steps = {name: train.on_cpu(words, TYPES, length, tokens) for name, words in trained(length).items()}
        yield length, {name: tokens / time for name, time in meter.seconds(steps).items()}


def memory(meter: Meter) -> Iterator[Row]:
    """Training step of one window: peak MiB above the memory before it, by tokens per window"""
    for length in lengths(meter):
        step, warm_up = ((TYPES, size, size) for size in (length, lengths(meter)[0]))
        steps = {name: ((words, *step), (words, *warm_up)) for name, words in trained(length).items()}
        yield length, {name: meter.mib(train.on_cpu, *both) for name, both in steps.items()}


def decoding(meter: Meter) -> Iterator[Row]:
    """Beam search of one window, beam 5: milliseconds per token, by tokens per window"""
    for length in lengths(meter):
        steps = {n: decode.search(*decode.build(words, TYPES, length), length) for n, words in models(length).items()}
        times = meter.seconds(steps, 1, warm_up=0) if length > 1024 else meter.seconds(steps)
        yield length, {name: 1000 * time / length for name, time in times.items()}


if __name__ == "__main__":
    main(__doc__, {"speed": speed, "memory": memory, "decoding": decoding}, drawn=True)
