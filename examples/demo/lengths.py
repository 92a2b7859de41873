"""Time and memory of a training step on one text, by its length, for a language model of the demo.

python lengths.py Mega|Transformer LONGEST OUT.json
"""

import json
import resource
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.nn.functional as F
from settings import LANGUAGE, lengths, training

from benchmarks.measure import Meter
from benchmarks.models import from_args

TYPES = 208
UNITS = 2**20 if sys.platform == "darwin" else 2**10  # of `ru_maxrss` in a MiB


def main() -> None:
    name, longest, out = sys.argv[1:]
    torch.set_num_threads(1)
    words = training(LANGUAGE, name, 1, Path(), Path())[3:]  # without the program and its data
    model = from_args([*words, f"--tokens-per-sample={longest}"], TYPES)
    before, rows = peak_mib(), []
    for length in lengths(int(longest)):  # from short to long, so that the peak is that of the last one
        tokens = torch.randint(4, TYPES, (1, length))

        def step(tokens: torch.Tensor = tokens) -> None:
            F.cross_entropy(model(tokens)[0].flatten(0, 1), tokens.flatten()).backward()
            model.zero_grad()

        milliseconds = 1e6 * Meter().seconds({name: step}, repeats=2)[name] / length
        rows.append({"bytes": length, "ms per 1,000": milliseconds, "MiB": peak_mib() - before})
        print(f"timed {length} bytes", flush=True)
    Path(out).write_text(json.dumps(rows) + "\n")


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / UNITS


if __name__ == "__main__":
    main()
