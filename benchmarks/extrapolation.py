"""Draws several sweeps in one figure: chunks and contexts longer than in training, one line per position bias.

    mega-fairseq sweep CHECKPOINT DATA --chunks 64,128,256,512,1024 --out rotary
    mega-fairseq sweep CHECKPOINT DATA --chunks 256 --contexts 256,1024,4096,16384,65536 --out rotary
    python benchmarks/extrapolation.py docs/extrapolation.png rotary=rotary.json rope=rope.json ...

Left: bits per token against the test chunk, with the longest context of the sweep. Right: against the context, at the
chunk size of training. Points that a model refuses are left out.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Dict, List, Tuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also runs without installation

from benchmarks.figures import Panel, draw


def lines(points: List[Dict], trained: int) -> Tuple[List[Tuple[int, float]], List[Tuple[int, float]]]:
    """(chunk, bits) with the longest context, and (context, bits) at the chunk size of training."""
    points = [point for point in points if point["bits"] is not None]
    longest = max((point["context"] for point in points), default=0)
    by_chunk = sorted((p["chunk"], p["bits"]) for p in points if p["context"] == longest)
    by_context = sorted((p["context"], p["bits"]) for p in points if p["chunk"] == trained)
    return by_chunk, by_context


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figure", type=Path, help="the PNG to draw")
    parser.add_argument("sweeps", nargs="+", metavar="NAME=FILE", help="name of a line, and the JSON of its sweep")
    parser.add_argument("--trained", type=int, default=256, help="chunk size of training")
    parser.add_argument("--segments", type=int, default=1024, help="tokens of the longest training segment")
    args = parser.parse_args()
    by_chunk, by_context = {}, {}
    for name, _, path in (sweep.partition("=") for sweep in args.sweeps):
        by_chunk[name], by_context[name] = lines(json.loads(Path(path).read_text())["points"], args.trained)
        if not by_context[name]:
            parser.error(f"{path} has no point at chunk {args.trained}; add it, or give another one with --trained")
        print(f"{name}: chunks {by_chunk[name]}, contexts {by_context[name]}")
    panels = [
        Panel("", "test chunk (dotted: in training)", "bits per token", by_chunk, True, args.trained),
        Panel("", "context (dotted: longest segment of training)", "", by_context, True, args.segments),
    ]
    draw(panels, args.figure)


if __name__ == "__main__":
    main()
