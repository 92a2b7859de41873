"""Time of a training step on one text, by its length, for a language model of the demo.

python lengths.py Mega|Transformer|Attention LONGEST OUT.json
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.nn.functional as F
from settings import LANGUAGE, training

from benchmarks.measure import Meter
from benchmarks.models import from_args

TYPES = 208


def main() -> None:
    name, longest, out = sys.argv[1:]
    torch.set_num_threads(1)
    words = training(LANGUAGE, name, 1, Path(), Path())[3:]  # without the program and its data
    model, rows, length = from_args([*words, f"--tokens-per-sample={longest}"], TYPES), [], 256
    while length <= int(longest):
        tokens = torch.randint(4, TYPES, (1, length))

        def step(tokens: torch.Tensor = tokens) -> None:
            F.cross_entropy(model(tokens)[0].flatten(0, 1), tokens.flatten()).backward()
            model.zero_grad()

        rows.append({"bytes": length, "ms per 1,000": 1e6 * Meter().seconds({name: step}, repeats=2)[name] / length})
        length *= 2
    Path(out).write_text(json.dumps(rows) + "\n")


if __name__ == "__main__":
    main()
