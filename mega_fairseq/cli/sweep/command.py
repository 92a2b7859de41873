"""`mega-fairseq sweep`: perplexity of a trained mega_lm at several chunk sizes and context lengths."""

import argparse
import re
import sys
from functools import partial
from typing import List, Optional, Sequence

from tqdm import tqdm

from mega_fairseq.cli import UserError, errors_of
from mega_fairseq.cli.output import check_prefix, table, write_figure
from mega_fairseq.cli.split import load_split
from mega_fairseq.cli.sweep import evaluate, processes
from mega_fairseq.cli.sweep.figure import figure
from mega_fairseq.cli.sweep.record import Point, Record, shown
from mega_fairseq.ops.sequence_parallel import SequenceGroup


def run(arguments: argparse.Namespace) -> None:
    chunks = None if arguments.chunks is None else numbers("--chunks", arguments.chunks)
    cuts = _cuts(arguments)
    for name, value in (("--max-tokens", arguments.max_tokens), ("--batch-size", arguments.batch_size)):
        if value is not None and value < 1:
            raise UserError(f"{name} is {value}; give a whole number of at least 1")
    group = processes.join(arguments.cpu)
    if group is not None and group.rank > 0:
        return _follow(arguments, group)
    prefix = arguments.out
    check_prefix(prefix, (".json", ".csv", ".png"), "points", arguments.force)
    record = _sweep(arguments, chunks, cuts, group)
    unit = record.origin["data"]["unit"]
    drawn = write_figure(f"{prefix}.png", partial(figure, record.points, unit))
    print(results(record.points, unit))
    print("wrote", ", ".join([f"{prefix}.json", f"{prefix}.csv", *drawn]))


def numbers(option: str, given: str) -> List[int]:
    """Parse numbers separated by commas, in the given order and without duplicates."""
    words = given.replace(" ", "").split(",")
    if not all(re.fullmatch(r"0*[1-9]\d{0,8}", word) for word in words):
        raise UserError(f"{option} is {given!r}; give whole numbers from 1 to 999,999,999, separated by commas")
    return list(dict.fromkeys(map(int, words)))


def _cuts(arguments: argparse.Namespace) -> List[str]:
    if arguments.contexts is not None:
        return [f"size:{tokens}" for tokens in numbers("--contexts", arguments.contexts)]
    if arguments.documents is not None:
        return [f"documents:{arguments.documents}"]
    return [f"splits:{streams}" for streams in numbers("--streams", arguments.streams)]


def _follow(arguments: argparse.Namespace, group: SequenceGroup) -> None:
    """Take part in the evaluation of each point that the first process announces."""
    split = load_split(arguments.data, arguments.subset)
    with errors_of(arguments.checkpoint):
        model, _ = evaluate.load_model(arguments.checkpoint, split, arguments.cpu, group)
    for chunk, cut in iter(processes.announce, None):
        with tqdm(disable=True) as bar:
            evaluate.measure(model, split, chunk, cut, (arguments.max_tokens, arguments.batch_size), bar)


def _sweep(
    arguments: argparse.Namespace, chunks: Optional[Sequence[int]], cuts: Sequence[str], group: Optional[SequenceGroup]
) -> Record:
    split = load_split(arguments.data, arguments.subset)
    tokens = len(split.corpus)
    most = max(int(cut.split(":")[1]) if cut.startswith("splits") else 1 for cut in cuts)
    if most > tokens:
        raise UserError(f"--streams has {most:,} and {arguments.subset} only {tokens:,} tokens; give fewer")
    with errors_of(arguments.checkpoint):
        model, origin = evaluate.load_model(arguments.checkpoint, split, arguments.cpu, group)
    record = Record(arguments.out, {"checkpoint": origin, "data": split.origin}, arguments.force)

    wanted = [(chunk, cut) for chunk in chunks or [model.decoder.cfg.decoder_chunk_size] for cut in cuts]
    plan = [point for point in wanted if not record.contains(*point)]
    if len(plan) < len(wanted):
        done = f"{len(wanted) - len(plan)} of {len(wanted)} points"
        print(f"{done} are in {arguments.out}.json already", file=sys.stderr)
    limits = arguments.max_tokens, arguments.batch_size
    try:
        with tqdm(total=len(plan) * tokens, unit="token", unit_scale=True, disable=None) as bar:
            for number, (chunk, cut) in enumerate(plan, 1):
                title = f"point {number} of {len(plan)}: chunk {shown(chunk)}, {cut}"
                bar.set_description(title)
                if group is not None:
                    processes.announce((chunk, cut))
                point = evaluate.measure(model, split, chunk, cut, limits, bar)
                record.add(point)
                bar.update(number * tokens - bar.n)  # pads, and what was left of a point that failed
                said = point.refused or f"{point.bits:.4f} bits, perplexity {point.perplexity:.2f}"
                bar.write(f"{title}: {said}", file=sys.stderr)
    except KeyboardInterrupt:
        raise UserError(f"interrupted; the same command continues from {arguments.out}.json") from None
    if group is not None:
        processes.announce(None)
    if not any(record.contains(*point) for point in wanted):
        raise UserError(f"no point could be evaluated; the last one: {point.refused}")
    return record


def results(points: Sequence[Point], unit: str) -> str:
    """A table of the evaluated points, and a line for each of the others."""
    rows = [["chunk", "streams", "context", f"bits/{unit}", "perplexity", "tokens", "seconds"]]
    lines = []
    for p in points:
        if p.refused is not None:
            lines.append(f"chunk {shown(p.chunk)}, {p.cut} was not evaluated: {p.refused}")
            continue
        sizes = [shown(p.chunk), f"{p.streams:,}", f"{p.context:,}"]
        rows.append([*sizes, f"{p.bits:.4f}", f"{p.perplexity:.2f}", f"{p.tokens:,}", f"{p.seconds:.1f}"])
    return "\n".join([table(rows, left=0), *lines])
