"""Time and memory against the length of windows: the models of quality_documents.py, on one CPU thread.

    python benchmarks/documents.py --json docs/documents.json      all tables, about 40 minutes
    python benchmarks/documents.py --plot docs/documents.json      only draws

Random weights and tokens, targets as long as sources. The Transformer is measured up to 4,096 tokens: its memory grows
with the square, and for its weights of cross attention fairseq's search copies beam x target x source numbers a token.
"""

import sys
from functools import partial
from pathlib import Path
from typing import Iterator, List

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also runs without installation

from benchmarks import decode, train
from benchmarks.figures import draw_tables
from benchmarks.measure import Meter, Row, parser, prepare_process, run
from benchmarks.quality_documents import SYSTEMS

TYPES = 3912
LENGTHS = [256, 512, 1024, 2048, 4096, 8192]
LONGEST = {"Transformer": 4096}
MODELS = {"Transformer": SYSTEMS["transformer"], "Mega, chunks of 128": SYSTEMS["mega"]}


def model(name: str, length: int) -> List[str]:
    return [*MODELS[name], f"--max-source-positions={length}", f"--max-target-positions={length}"]


def fitting(length: int) -> List[str]:
    return [name for name in MODELS if length <= LONGEST.get(name, length)]


def training(name: str, length: int) -> List[str]:
    return [*model(name, length), *train.TRANSLATION, *(train.DROPOUT if name == "Transformer" else train.MEGA)]


def speed(lengths: List[int], meter: Meter) -> Iterator[Row]:
    """Training step: tokens per CPU second, by tokens per window"""
    for length in lengths:
        tokens = max(lengths[-1] // 2, length)
        steps = {name: train.on_cpu(training(name, length), TYPES, length, tokens) for name in fitting(length)}
        yield length, {name: tokens / time for name, time in meter.seconds(steps).items()}


def memory(lengths: List[int], meter: Meter) -> Iterator[Row]:
    """Training step of one window: peak MiB above the memory before it, by tokens per window"""
    for length in lengths:
        sizes = (length, lengths[0])
        steps = {name: [(training(name, length), TYPES, size, size) for size in sizes] for name in fitting(length)}
        yield length, {name: meter.mib(train.on_cpu, *both) for name, both in steps.items()}


def decoding(lengths: List[int], meter: Meter) -> Iterator[Row]:
    """Beam search of one window, beam 5: milliseconds per token, by tokens per window"""
    for length in lengths:
        models = {name: decode.build(model(name, length), TYPES, length) for name in fitting(length)}
        steps = {name: decode.search(*each, length) for name, each in models.items()}
        times = meter.seconds(steps, 1, warm_up=0) if length > 1024 else meter.seconds(steps)
        yield length, {name: 1000 * time / length for name, time in times.items()}


TABLES = {"speed": speed, "memory": memory, "decoding": decoding}


def main() -> None:
    arguments = parser(__doc__, TABLES)
    arguments.add_argument("--plot", type=Path, metavar="FILE", help="only draw the tables of FILE, next to it")
    args = arguments.parse_args()
    prepare_process()
    if args.plot:
        return draw_tables(args.plot, TABLES)
    lengths = [32] if args.quick else LENGTHS
    run({name: partial(table, lengths) for name, table in TABLES.items()}, args)


if __name__ == "__main__":
    main()
