"""Draws several sweeps in one figure: chunks and contexts longer than in training, one line per position bias.

    mega-fairseq sweep CHECKPOINT DATA --chunks 64,128,256,512,1024 --out rotary
    mega-fairseq sweep CHECKPOINT DATA --chunks 256 --contexts 256,1024,4096,16384,65536 --out rotary
    python benchmarks/extrapolation.py docs/extrapolation.png rotary=rotary.json rope=rope.json ...

Left: bits per token against the test chunk, with the longest context of the sweep. Right: against the context, at the
chunk size of training (--trained). Points that a model refuses are left out.
"""

import argparse
import json
from typing import Dict, List, Tuple


def lines(points: List[Dict], trained: int) -> Tuple[List[Tuple[int, float]], List[Tuple[int, float]]]:
    """(chunk, bits) with the longest context, and (context, bits) at the chunk size of training."""
    points = [point for point in points if point["bits"] is not None]
    longest = max((point["context"] for point in points), default=0)
    by_chunk = sorted((p["chunk"], p["bits"]) for p in points if p["context"] == longest)
    by_context = sorted((p["context"], p["bits"]) for p in points if p["chunk"] == trained)
    return by_chunk, by_context


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figure", help="the PNG to draw")
    parser.add_argument("sweeps", nargs="+", metavar="NAME=FILE", help="name of a line, and the JSON of its sweep")
    parser.add_argument("--trained", type=int, default=256, help="chunk size of training")
    parser.add_argument("--segments", type=int, default=1024, help="tokens of the longest training segment")
    args = parser.parse_args()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4.2), sharey=True)
    chunks, contexts = set(), set()
    for sweep in args.sweeps:
        name, _, path = sweep.partition("=")
        with open(path) as file:
            by_chunk, by_context = lines(json.load(file)["points"], args.trained)
        if not by_context:
            parser.error(f"{path} has no point at chunk {args.trained}; add it, or give another one with --trained")
        for axis, values in ((left, by_chunk), (right, by_context)):
            axis.plot(*zip(*values), marker=".", label=name)
        chunks.update(chunk for chunk, _ in by_chunk)
        contexts.update(context for context, _ in by_context)
        print(f"{name}: chunks " + ", ".join(f"{x} {y:.4f}" for x, y in by_chunk))
        print(f"{'':{len(name)}}  contexts " + ", ".join(f"{x} {y:.4f}" for x, y in by_context))
    left.axvline(args.trained, color="grey", linestyle=":")
    right.axvline(args.segments, color="grey", linestyle=":")
    left.set(xscale="log", xlabel="test chunk (dotted: in training)", ylabel="bits per token")
    right.set(xscale="log", xlabel="context (dotted: longest segment of training)")
    for axis, places in ((left, chunks), (right, contexts)):
        axis.set_xticks(sorted(places), [f"{place:,}" for place in sorted(places)])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    left.legend()
    figure.tight_layout()
    figure.savefig(args.figure, dpi=120)


if __name__ == "__main__":
    main()
