"""`mega-fairseq sweep`: perplexity of a trained mega_lm against chunk size and context length."""

import argparse
import re
import sys
from functools import partial
from typing import List, Sequence

from mega_fairseq.cli.files import write_figure
from mega_fairseq.cli.quiet import quiet
from mega_fairseq.cli.refusal import Refusal
from mega_fairseq.cli.sweep_record import Point, Record, check_prefix


def run(arguments: argparse.Namespace) -> None:
    chunks, cuts = numbers("--chunks", arguments.chunks), _cuts(arguments)
    for name, value in (("--max-tokens", arguments.max_tokens), ("--batch-size", arguments.batch_size)):
        if value is not None and value < 1:
            raise Refusal(f"{name} is {value}; give a whole number from 1 on")
    check_prefix(arguments.out, arguments.force)
    with quiet():
        record = _sweep(arguments, chunks, cuts)
        _draw(record)
    print(table(record.points))


def numbers(option: str, given: str) -> List[int]:
    """Each once, in the order in which they were given."""
    words = given.replace(" ", "").split(",")
    if not all(re.fullmatch(r"0*[1-9]\d{0,8}", word) for word in words):
        raise Refusal(f"{option} is {given!r}; give whole numbers from 1 to 999,999,999, separated by commas")
    return list(dict.fromkeys(map(int, words)))


def _cuts(arguments: argparse.Namespace) -> List[str]:
    if arguments.contexts is not None:
        return [f"size:{tokens}" for tokens in numbers("--contexts", arguments.contexts)]
    if arguments.documents is not None:
        return [f"documents:{arguments.documents}"]
    given = "1" if arguments.streams is None else arguments.streams
    return [f"splits:{streams}" for streams in numbers("--streams", given)]


def _sweep(arguments: argparse.Namespace, chunks: Sequence[int], cuts: Sequence[str]) -> Record:
    # Only now: fairseq takes seconds to import.
    from mega_fairseq.cli import sweep_points as points

    split = points.load_split(arguments.data, arguments.subset)
    most = max(int(cut.split(":")[1]) if cut.startswith("splits") else 1 for cut in cuts)
    if most > len(split.corpus):
        raise Refusal(f"--streams has {most:,} and {arguments.subset} only {len(split.corpus):,} tokens; give fewer")
    device = points.choose_device(arguments.cpu)
    trained = points.load_model(arguments.checkpoint, split, device)
    record = Record.open(arguments.out, {"checkpoint": trained.origin, "data": split.origin}, arguments.force)

    wanted = [(chunk, cut) for chunk in chunks for cut in cuts]
    plan = [point for point in wanted if not record.knows(*point)]
    if len(plan) < len(wanted):
        known = f"{len(wanted) - len(plan)} of {len(wanted)} points"
        print(f"{known} are in {arguments.out}.json already", file=sys.stderr)
    limits = points.Limits(arguments.max_tokens, arguments.batch_size)
    try:
        with points.Progress(len(plan), len(split.corpus)) as progress:
            for chunk, cut in plan:
                progress.start(f"chunk {chunk}, {cut}")
                point = points.measure(trained.model, split, chunk, cut, limits, progress)
                record.add(point)
                progress.say(point.refused or f"{point.bits:.4f} bits, perplexity {point.perplexity:.2f}")
    except KeyboardInterrupt:
        raise Refusal(f"interrupted; the same command goes on from what is in {arguments.out}.json") from None
    if not any(record.knows(*point) for point in wanted):
        raise Refusal(f"no point could be evaluated, the last because {point.refused}")
    return record


def _draw(record: Record) -> None:
    from mega_fairseq.cli.sweep_figure import figure

    write_figure(f"{record.prefix}.png", partial(figure, record.points))


def table(points: Sequence[Point]) -> str:
    """For people: one line a point, each with what it has."""
    lines = [
        f"{'chunk':>8} {'streams':>9} {'context':>12} {'bits':>8} {'perplexity':>11} {'tokens':>12} {'seconds':>9}"
    ]
    for point in points:
        line = f"{point.chunk:8} {point.streams:9,} {point.context:12,} "
        if point.refused is None:
            line += f"{point.bits:8.4f} {point.perplexity:11.2f} {point.tokens:12,} {point.seconds:9.1f}"
        else:
            line += f"refused: {point.refused}"
        lines.append(line)
    return "\n".join(lines)
