"""`mega-fairseq classify`: labels and probabilities, for a split of a folder or for lines of standard input."""

import argparse
import re
import sys
from functools import partial
from itertools import islice
from typing import Any, Iterator, Optional

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
from mega_fairseq.data.stored import numbers_in
from mega_fairseq.tasks.prediction import Classifier, Prediction

LARGEST = 1_000_000  # batch


def run(arguments: argparse.Namespace) -> None:
    if not 1 <= arguments.batch_size <= LARGEST:
        raise UserError(f"--batch-size is {arguments.batch_size}; give a whole number from 1 to {LARGEST:,}")
    typed, prefix = arguments.data == "-", arguments.out
    if typed and prefix:
        raise UserError("--out describes a split with labels; give a folder in place of -, or leave it out")
    if prefix is not None:
        check_prefix(prefix, (".json", ".png"), "confusion")
    with errors_of(arguments.checkpoint):
        classifier = load(arguments.checkpoint, None if typed else arguments.data, arguments.cpu)
    if typed:
        for line in classified_lines(classifier, sys.stdin.buffer, 1 if sys.stdin.isatty() else arguments.batch_size):
            print(line, flush=True)
        return
    examples = read_examples(classifier, arguments.subset)
    if prefix and examples.classes is None:
        raise UserError(f"{arguments.subset} has no labels, which --out needs; add them, or leave --out out")
    probabilities = classified(classifier, examples, arguments.batch_size)
    print(*(shown(classifier.prediction(row)) for row in probabilities), sep="\n")
    if examples.classes is None:
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
    needs_pairs = classifier.models[0].cfg.pairs
    if layout.pairs() != needs_pairs:
        known, found = ("pairs", "one input") if needs_pairs else ("single inputs", "two inputs")
        remedy = "give other data" if needs_pairs else "train with --task mega_classification and --pairs"
        raise UserError(f"the model classifies {known}, and {task.cfg.data} has {found} for each label; {remedy}")
    try:
        numbers = None
        if layout.labels_file(split).exists():
            numbers = class_numbers(layout.labels(split), task.classes, str(layout.labels_file(split)))
        examples = task.examples(layout.inputs(split), numbers)
    except (FileNotFoundError, ValueError) as error:
        raise UserError(str(error)) from None
    for inputs in examples.inputs:
        if inputs.cut:
            print(f"{inputs.about_cut()} and are cut, as in the training", file=sys.stderr)
    return examples


def classified(classifier: Classifier, examples: ExampleDataset, batch_size: int) -> Tensor:
    """The probabilities (N, classes) of all examples."""
    found = torch.zeros(len(examples), len(classifier.labels))
    with tqdm(total=len(examples), unit="example", disable=None) as bar:
        try:
            for rows, probabilities in classifier.probabilities(examples, batch_size):
                found[rows] = probabilities
                bar.update(len(rows))
        except ValueError as error:
            raise UserError(str(error)) from None
    return found


def shown(prediction: Prediction) -> str:
    return f"{prediction.label}\t{prediction.probability:.4f}"


def classified_lines(classifier: Classifier, lines: Iterator[bytes], batch_size: int) -> Iterator[str]:
    """A result for each line, several lines at a time; those before a line with an error have results too."""
    numbered, cut = enumerate(lines, 1), 0
    for batch in iter(lambda: list(islice(numbered, batch_size)), []):
        inputs, refused = [], None
        for number, line in batch:
            try:
                parsed = _parsed(classifier, re.sub(rb"\r?\n?\Z", b"", line))  # as in files
                cut += any(one.cut for one in classifier.examples([parsed]).inputs)
                inputs.append(parsed)
            except ValueError as error:
                refused = f"in line {number}: {error}"
                break
        try:
            yield from map(shown, classifier.predict(inputs, batch_size))
        except ValueError as error:
            raise UserError(f"after line {batch[0][0] - 1}: {error}") from None
        if refused:
            raise UserError(refused)
    if cut:
        longest = classifier.task.longest
        print(f"longer than {longest:,} positions and cut, as in the training: {cut:,} lines", file=sys.stderr)


def _parsed(classifier: Classifier, line: bytes) -> Any:
    """The input of a line, or both inputs of a pair, which a tab separates."""
    one = {"bytes": bytes, "tokens": _text, "values": partial(_numbers, classifier.task.number_type)}
    parse = one[str(classifier.task.cfg.input_kind)]
    if not classifier.models[0].cfg.pairs:
        return parse(line)
    parts = line.split(b"\t")
    if len(parts) != 2:
        raise ValueError(f"the number of tabs is {len(parts) - 1}; give two inputs with one tab between them")
    return tuple(map(parse, parts))


def _text(line: bytes) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError:
        raise ValueError("this is not UTF-8 text; convert it") from None


def _numbers(number_type: Optional[str], line: bytes) -> np.ndarray:
    """Numbers of the type of the training."""
    if number_type is None:
        raise ValueError(
            "the checkpoint does not say whether it was trained on uint8, int16 or floats; give a folder in place of -"
        )
    try:
        values = numbers_in(line, np.float64)
    except ValueError:
        raise ValueError("a word is not a number; give numbers, separated by blanks") from None
    if number_type == "float" or not values.size:
        return values
    limits = np.iinfo(number_type)
    if (values != values.round()).any() or values.min() < limits.min or values.max() > limits.max:
        raise ValueError(f"numbers must be integers from {limits.min:,} to {limits.max:,}, as in the training")
    return values.astype(number_type)
