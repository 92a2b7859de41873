"""`mega-fairseq documents score`: BLEU and chrF of documents and of lines, by sacrebleu."""

import argparse
import json
import os
import re
from bisect import bisect
from functools import partial
from typing import Any, Dict, List, Optional, Sequence, Tuple

from sacrebleu.metrics import BLEU, CHRF
from sacrebleu.significance import PairedTest

from mega_fairseq.cli import UserError
from mega_fairseq.cli.documents.translations import KEYS
from mega_fairseq.cli.output import check_file, plain, table, write_figure
from mega_fairseq.documents import document_borders, read_lines

SUBWORDS = re.compile("\u2581|@@( |$)")
PLACES = {1: "1", 2: "2", 3: "3-4", 5: "5-8", 9: "9-16", 17: "17+"}  # of a line in its window, by the first
Groups = Dict[str, Dict[str, List[int]]]  # numbers of lines, by title and label

FEWEST = 6  # documents of a bootstrap, which gives a system that is better in each of them p = 0.001 for any number
METRICS = {"BLEU": BLEU(), "chrF": CHRF()}


def run(arguments: argparse.Namespace) -> None:
    if arguments.figure is not None:
        check_file(arguments.figure)
    systems = [path for path in (arguments.hypothesis, arguments.against) if path is not None]
    inputs = [arguments.reference, arguments.source or arguments.reference, arguments.docs]
    texts = {path: read_lines(path) for path in [*systems, *inputs]}
    reference, source, ids = (texts[path] for path in inputs)
    if len(set(map(len, texts.values()))) > 1 or not ids:
        counts = ", ".join(f"{path} has {len(lines):,} lines" for path, lines in texts.items())
        raise UserError(f"{counts}; give files with a line for each line of the source")
    for path in systems:
        if any(map(SUBWORDS.search, texts[path])) and not any(map(SUBWORDS.search, reference)):
            raise UserError(f"{path} has subwords and {arguments.reference} has words; undo the segmentation first")
    borders = document_borders(ids, arguments.docs)
    given = {arguments.hypothesis: arguments.counts}
    counts = {path: read_counts(given.get(path), path, len(ids)) for path in systems}
    windows = {tuple(lines for lines, _ in each) for each in counts.values() if each}
    groups = group_lines(borders, *(windows if len(windows) == 1 else [()]))
    scores = {path: measure(texts[path], reference, source, borders, groups) for path in systems}

    print(f"{len(borders) - 1:,} documents, {len(ids):,} lines")
    for path, each in counts.items():
        unequal = sum(lines != translated for lines, translated in each)
        if each:
            print(f"{path}: {len(each):,} windows; {unequal:,} had another number of lines")
    if len(windows) > 1:
        print("scores by place in the window are left out, since the two have different windows")
    rows = [["", *systems]]
    for name in scores[systems[0]]:
        values = [scores[path][name] for path in systems]
        rows.append([name, *(f"{value:.2f}" if isinstance(value, float) else f"{value:,}" for value in values)])
    print(table(rows))
    if arguments.against is not None:
        print(compare(*(join(texts[path], borders) for path in [*systems, arguments.reference])))
    for name, metric in METRICS.items():
        print(f"{name}: {metric.get_signature()}")
    if arguments.figure is not None:
        write_figure(arguments.figure, partial(figure, groups, scores))


def read_counts(given: Optional[str], hypothesis: str, lines: int) -> List[Tuple[int, int]]:
    """The lines of each window and of its translation, from a file of `documents split`, if there is one."""
    path = given or f"{os.path.splitext(hypothesis)[0]}.json"
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
        counts = list(zip(*(content[key] for key in KEYS)))
        if any(type(number) is not int or number < 0 for pair in counts for number in pair):
            raise ValueError
    except (OSError, KeyError, RecursionError, TypeError, ValueError):
        if given is None:
            return []
        raise UserError(f"{path} was not written by mega-fairseq documents split; give its PREFIX.json") from None
    total = sum(source for source, _ in counts)
    if total != lines:
        raise UserError(
            f"the windows of {path} have {total:,} lines and {hypothesis} has {lines:,}; give files of the same "
            "documents split, the .json of the hypothesis as --counts"
        )
    return counts


def group_lines(borders: Sequence[int], windows: Sequence[int]) -> Groups:
    """Lines by the quarter of their document, and by their place in the window if the windows are known."""
    quarters: Dict[str, List[int]] = {str(quarter): [] for quarter in range(1, 5)}
    for start, stop in zip(borders, borders[1:]):
        for line in range(start, stop):
            quarters[str(1 + 4 * (line - start) // (stop - start))].append(line)
    places: Dict[str, List[int]] = {label: [] for label in PLACES.values()}
    for line, place in enumerate(place for lines in windows for place in range(1, lines + 1)):
        places[list(places)[bisect(list(PLACES), place) - 1]].append(line)
    groups = {"quarter of the document": quarters, "place in the window": places}
    return {
        title: {f"{label} ({len(lines):,} of {borders[-1]:,} lines)": lines for label, lines in parts.items() if lines}
        for title, parts in groups.items()
    }


def join(lines: Sequence[str], borders: Sequence[int]) -> List[str]:
    """Each document as one segment."""
    return [" ".join(lines[start:stop]) for start, stop in zip(borders, borders[1:])]


def measure(
    hypothesis: List[str], reference: List[str], source: List[str], borders: Sequence[int], groups: Groups
) -> Dict[str, Any]:
    """Scores and counts of one system."""
    result = {}
    documents = [join(side, borders) for side in (hypothesis, reference)]
    for kind, (found, expected) in (("d", documents), ("s", (hypothesis, reference))):
        for name, metric in METRICS.items():
            result[f"{kind}-{name}"] = metric.corpus_score(found, [expected])
    bleu = result["d-BLEU"]
    result = {name: score.score for name, score in result.items()}
    result.update({"length ratio": bleu.ratio, "brevity penalty": bleu.bp, "empty lines": hypothesis.count("")})
    result["repeated lines"] = sum(
        "" != line == before and source[number] != source[number - 1]
        for number, (before, line) in enumerate(zip(hypothesis, hypothesis[1:]), 1)
    )
    result["lengths below 1/3 or above 3"] = sum(
        bool(line) and not len(expected) <= 3 * len(line) <= 9 * len(expected)
        for line, expected in zip(hypothesis, reference)
    )
    for title, parts in groups.items():
        for label, lines in parts.items():
            found, expected = ([side[line] for line in lines] for side in (hypothesis, reference))
            result[f"s-BLEU, {title} {label}"] = METRICS["BLEU"].corpus_score(found, [expected]).score
    return result


def compare(system: List[str], baseline: List[str], reference: List[str]) -> str:
    """A paired bootstrap over documents."""
    if len(reference) < FEWEST:
        return f"no paired bootstrap: it needs {FEWEST} documents, and there are {len(reference)}"
    if system == baseline:
        return "no paired bootstrap: translations are equal"
    test = PairedTest([("baseline", baseline), ("system", system)], METRICS, [reference], test_type="bs")
    signatures, results = test()
    lines = [f"paired bootstrap over documents, {test.n_samples:,} samples, with 95% intervals:"]
    for name in signatures:
        other, one = (f"{result.mean:.2f} ± {result.ci:.2f}" for result in results[name])
        lines.append(f"d-{name} {one} against {other}, p = {results[name][1].p_value:.4f}")
    return "\n".join(lines)


def figure(groups: Groups, scores: Dict[str, Dict[str, Any]]) -> Any:
    """s-BLEU by place, with a line for each system."""
    from matplotlib.figure import Figure

    shown_groups = {title: parts for title, parts in groups.items() if parts}
    drawing = Figure(figsize=(5 * len(shown_groups), 4), layout="constrained")
    axes = drawing.subplots(1, len(shown_groups), sharey=True, squeeze=False)[0]
    for axis, (title, labels) in zip(axes, shown_groups.items()):
        ticks = [f"{label.split()[0]}\n{len(lines):,}" for label, lines in labels.items()]
        for path, values in scores.items():
            axis.plot(ticks, [values[f"s-BLEU, {title} {label}"] for label in labels], marker=".", label=plain(path))
        axis.set(xlabel=f"{title}, and number of lines")
        axis.grid(alpha=0.3)
    axes[0].set(ylabel="s-BLEU")
    axes[0].legend(fontsize=7)
    return drawing
