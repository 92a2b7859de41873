"""`mega-fairseq classify`: labels and probabilities, for a split of a folder or for lines of standard input."""

import argparse
import sys
from functools import partial
from itertools import islice
from typing import Any, Iterator

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from mega_fairseq.cli import UserError, errors_of
from mega_fairseq.cli.classify.classifier import load
from mega_fairseq.cli.classify.figure import figure
from mega_fairseq.cli.classify.scores import Scores
from mega_fairseq.cli.output import check_prefix, write_figure, write_json
from mega_fairseq.data.classification.examples import ExampleDataset
from mega_fairseq.data.classification.labels import class_numbers
from mega_fairseq.tasks.prediction import Classifier, Prediction


def run(arguments: argparse.Namespace) -> None:
    if arguments.batch_size < 1:
        raise UserError(f"--batch-size is {arguments.batch_size}; give a whole number of at least 1")
    typed, prefix = arguments.data == "-", arguments.out
    if typed and prefix:
        raise UserError("--out describes a split with labels; give a folder in place of -, or leave it out")
    if prefix:
        check_prefix(prefix, (".json", ".png"), "confusion")
    with errors_of(arguments.checkpoint):
        classifier = load(arguments.checkpoint, None if typed else arguments.data, arguments.cpu)
    if typed:
        for line in classified_lines(classifier, sys.stdin.buffer, 1 if sys.stdin.isatty() else arguments.batch_size):
            print(line, flush=True)
        return
    examples = read_examples(classifier, arguments.subset)
    probabilities = classified(classifier, examples, arguments.batch_size)
    print(*(shown(classifier.prediction(row)) for row in probabilities), sep="\n")
    if examples.classes is None:
        if prefix:
            raise UserError(f"{arguments.subset} has no labels, which --out needs; add them, or leave --out out")
        return
    scores = Scores(classifier.labels, torch.from_numpy(examples.classes), probabilities)
    print(scores.summary(), file=sys.stderr)
    if prefix:
        origin = {"checkpoint": arguments.checkpoint, "data": arguments.data, "subset": arguments.subset}
        write_json(prefix, {**origin, **scores.numbers()})
        drawn = write_figure(f"{prefix}.png", partial(figure, classifier, examples, scores))
        print("wrote", ", ".join([f"{prefix}.json", *drawn]), file=sys.stderr)


def read_examples(classifier: Classifier, split: str) -> ExampleDataset:
    """A split with its labels, if it has any."""
    task, layout = classifier.task, classifier.task.layout
    try:
        numbers = None
        if layout.labels_file(split).exists():
            numbers = class_numbers(layout.labels(split), task.classes, str(layout.labels_file(split)))
        return task.examples(layout.inputs(split), numbers)
    except (FileNotFoundError, ValueError) as error:
        raise UserError(str(error)) from None


def classified(classifier: Classifier, examples: ExampleDataset, batch_size: int) -> Tensor:
    """The probabilities (N, classes) of all examples."""
    found = torch.zeros(len(examples), len(classifier.labels))
    with tqdm(total=len(examples), unit="example", disable=None) as bar:
        for rows, probabilities in classifier.probabilities(examples, batch_size):
            found[rows] = probabilities
            bar.update(len(rows))
    return found


def shown(prediction: Prediction) -> str:
    return f"{prediction.label}\t{prediction.probability:.4f}"


def classified_lines(classifier: Classifier, lines: Iterator[bytes], batch_size: int) -> Iterator[str]:
    """A result for each line, several lines at a time; both inputs of a pair are separated by a tab."""
    number = 0
    for batch in iter(lambda: list(islice(lines, batch_size)), []):
        try:
            inputs = [_parsed(classifier, line.rstrip(b"\r\n")) for line in batch]
            predictions = classifier.predict(inputs, batch_size)
        except (UnicodeDecodeError, ValueError) as error:
            raise UserError(f"in lines {number + 1} to {number + len(batch)}: {error}") from None
        number += len(batch)
        yield from map(shown, predictions)


def _parsed(classifier: Classifier, line: bytes) -> Any:
    kind = str(classifier.task.cfg.input_kind)
    one = {"bytes": bytes, "tokens": bytes.decode, "values": _numbers}[kind]
    if not classifier.models[0].cfg.pairs:
        return one(line)
    return tuple(map(one, line.split(b"\t")))


def _numbers(line: bytes) -> np.ndarray:
    """Integers from 0 to 255, or any numbers if one of them has a point."""
    words = line.split()
    try:
        values = np.array(words, dtype=np.float64)
    except ValueError:
        raise ValueError("a word is not a number; give numbers, separated by blanks") from None
    if b"." in line or b"e" in line.lower():
        return values
    if values.size and (values.min() < 0 or values.max() > 255):
        raise ValueError("integers must be from 0 to 255; give other numbers with a decimal point")
    return values.astype(np.uint8)
