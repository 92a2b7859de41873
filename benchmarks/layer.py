"""Speed and memory of layers of equal size, on one CPU thread.

    python benchmarks/layer.py --json docs/layer.json                        Mega beside torch's Transformer layer
    python benchmarks/layer.py --contenders mixers --json docs/mixers.json   all token mixers beside its causal form
    python benchmarks/layer.py --plot docs/layer.json                        draws docs/layer.png

Steps have 8,192 tokens, or one sequence if it is longer; in the table `flat`, 65,536. Everything is compared with
itself token by token before it is timed. All tables take about 50 minutes.
"""

import sys
from functools import partial
from pathlib import Path
from typing import Any, Iterable, Iterator, List, Tuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also runs without installation

from benchmarks import contenders as c
from benchmarks.figures import draw_tables
from benchmarks.measure import Meter, Row, Step, parser, prepare_process, run

TOKENS = 8192
LENGTHS = [128, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536]
DECODED = [64, 256, 1024, 4096, 8192]
BEAM, SINGLE_TOKENS = 5, 20


def check(names: List[str]) -> None:
    """Raises unless layers have equal sizes and equal themselves token by token."""
    torch.manual_seed(0)
    size = c.size_of(c.layer(c.TRANSFORMER))
    for name in names:
        module = c.layer(name).double()
        assert abs(c.size_of(module) / size - 1) < 0.02, f"{name}: {c.size_of(module):,} parameters, torch {size:,}"
        if isinstance(module, c.Stack) and module.blocks[0].causal:
            x, outputs, states = torch.randn(1, 140, c.DIM, dtype=torch.float64), [], [None] * len(module.blocks)
            for token in x.split(1, 1):
                y, states = through(module.blocks, token, states)
                outputs.append(y)
            torch.testing.assert_close(module(x), torch.cat(outputs, 1), rtol=0, atol=1e-9)
    print("correct: whole sequences = token by token, equal parameters")


@torch.no_grad()
def through(blocks: Iterable[Any], x: Tensor, states: List[Any]) -> Tuple[Tensor, List[Any]]:
    """Passes tokens through the blocks of a layer, after `states`."""
    after = []
    for block, state in zip(blocks, states):
        x, state = block(x, state)
        after.append(state)
    return x, after


def speed(names: List[str], lengths: List[int], tokens: int, meter: Meter) -> Iterator[Row]:
    """One layer, forward and backward: tokens per second, by tokens per sequence"""
    for length in lengths:
        steps = {name: c.layer_step(name, length, tokens) for name in c.fitting(names, length)}
        count = max(tokens, length)
        times = meter.seconds(steps) if count <= TOKENS else meter.seconds(steps, 1, warm_up=0)  # long ones are stable
        yield length, {name: count / time for name, time in times.items()}


def memory(names: List[str], lengths: List[int], tokens: int, meter: Meter) -> Iterator[Row]:
    """One layer, forward and backward: peak MiB above the memory before it, by tokens per sequence"""
    for length in lengths:
        fitting = c.fitting(names, length)
        yield length, {name: meter.mib(c.layer_step, (name, length, tokens), (name, 256, 256)) for name in fitting}


def decode(names: List[str], lengths: List[int], meter: Meter) -> Iterator[Row]:
    """The last tokens of five sequences, one layer: milliseconds per token, by tokens before them"""
    causal = [name for name in names if name in c.LAYERS and c.LAYERS[name].get("causal", True)]
    for length in lengths:
        times = meter.seconds({name: single_tokens(name, length) for name in causal})
        yield length, {name: 1000 * time / SINGLE_TOKENS for name, time in times.items()}


def single_tokens(name: str, length: int) -> Step:
    """Passes SINGLE_TOKENS tokens through a causal layer one by one, always from the same states."""
    blocks = c.layer(name).blocks.eval()
    _, reached = through(blocks, torch.randn(BEAM, length - SINGLE_TOKENS, c.DIM), [None] * len(blocks))
    x, single = torch.randn(BEAM, 1, c.DIM), [block.step() for block in blocks]

    def step() -> None:
        states = reached
        for _ in range(SINGLE_TOKENS):
            _, states = through(single, x, states)

    return step


def main() -> None:
    arguments = parser(__doc__, ("speed", "memory", "flat", "decode"))
    arguments.add_argument("--contenders", choices=c.GROUPS, default="mega")
    arguments.add_argument("--plot", type=Path, metavar="FILE", help="only draw the tables of FILE, next to it")
    args = arguments.parse_args()
    if args.plot:
        return draw_tables(args.plot, ["speed", "memory"])
    prepare_process()
    layers = c.GROUPS[args.contenders]
    check(layers)
    lengths, decoded, tokens = ([512], [64], 512) if args.quick else (LENGTHS, DECODED, TOKENS)
    ends = lengths[-1:] if args.quick else [1024, lengths[-1]]
    tables = {
        "speed": partial(speed, layers, lengths, tokens),
        "memory": partial(memory, layers, [length for length in lengths if length <= TOKENS], tokens),
        "flat": partial(speed, c.fitting(layers, ends[-1]), ends, ends[-1]),
        "decode": partial(decode, layers, decoded),
    }
    run(tables, args)


if __name__ == "__main__":
    main()
