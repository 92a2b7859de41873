"""`mega-fairseq classify`: labels and probabilities, for a split of a folder or for lines of standard input."""

import argparse
import math
import re
import sys
from dataclasses import fields
from functools import partial
from itertools import islice
from typing import Any, Dict, Iterator, List, NamedTuple, Optional

import numpy as np
import torch
from torch import Tensor

from mega_fairseq.cli import UserError, errors_of, is_for_user
from mega_fairseq.cli.checkpoint import trained
from mega_fairseq.cli.checkpoint.build import empty_model, fill
from mega_fairseq.cli.checkpoint.trained import Checkpoint
from mega_fairseq.cli.output import check_prefix, plain, write_figure, write_json
from mega_fairseq.data.classification.examples import ExampleDataset
from mega_fairseq.data.classification.labels import class_numbers
from mega_fairseq.models.mega_encoder import CLASSES, HeadedEncoder
from mega_fairseq.tasks import MegaClassificationConfig, MegaClassificationTask
from mega_fairseq.tasks.prediction import Classifier, Prediction

TASKS = ("mega_classification", "sentence_prediction")


def run(arguments: argparse.Namespace) -> None:
    if arguments.batch_size < 1:
        raise UserError(f"--batch-size is {arguments.batch_size}; give a whole number of at least 1")
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
    probabilities = classifier.probabilities(examples, arguments.batch_size, progress=True)
    print(*(shown(classifier.prediction(row)) for row in probabilities), sep="\n")
    if examples.classes is None:
        return
    scores = Scores(classifier.labels, torch.from_numpy(examples.classes), probabilities)
    print(scores.summary(), file=sys.stderr)
    if prefix:
        origin = {"checkpoint": arguments.checkpoint, "data": arguments.data, "subset": arguments.subset}
        write_json(prefix, {**origin, **scores.numbers()})
        drawn = write_figure(f"{prefix}.png", partial(figure, scores))
        print("wrote", ", ".join([f"{prefix}.json", *drawn]), file=sys.stderr)


# --------------------------------------------------------------------------------------- the classifier


def load(path: str, data: Optional[str], cpu: bool) -> Classifier:
    """The model with its task, on a GPU if there is one; `data` is None for inputs that are not in a folder."""
    checkpoint = trained.read(path)
    checkpoint.check_task(*TASKS)
    model = fill(empty_model(checkpoint), checkpoint.tensors)
    if not isinstance(model, HeadedEncoder):
        raise UserError(f"contains the model {type(model).__name__}; give a mega_classifier or mega_encoder")
    stored = checkpoint.cfg["task"]
    if stored.get("regression_target"):
        raise UserError("predicts numbers (--regression-target); give a model of classes")
    options = {field.name: stored[field.name] for field in fields(MegaClassificationConfig) if field.name in stored}
    options.update({"seed": 1} if data is None else {"seed": 1, "data": data})
    try:
        task = MegaClassificationTask.setup_task(MegaClassificationConfig(**options), from_checkpoint=data is None)
        task.load_state_dict(checkpoint.task_state)
        task.check_classes()
        if not "".join(task.classes).isprintable():
            raise UserError("has names of classes with characters that are not printable; get the file again")
    except (AttributeError, LookupError, TypeError) as error:
        raise UserError(f"has a value of the wrong type among its task's ({error}); get the file again") from None
    _check_fit(model, task, checkpoint)
    classifier = Classifier(task, [model.float()])
    return classifier if cpu or not torch.cuda.is_available() else classifier.cuda()


def _check_fit(model: HeadedEncoder, task: MegaClassificationTask, checkpoint: Checkpoint) -> None:
    heads = [tensor.size(0) for name, tensor in checkpoint.tensors.items() if CLASSES.fullmatch(name)]
    if len(heads) != 1:
        raise UserError(f"has {len(heads)} classification heads; give one that was trained with {' or '.join(TASKS)}")
    if task.folder.pairs() and checkpoint.word("task") == "sentence_prediction":
        raise UserError(
            f"was trained with --task sentence_prediction, which joins the pairs in {task.cfg.data} to single inputs, "
            "and only fairseq-validate does this, too; train with --task mega_classification and --pairs"
        )
    types = (len(dictionary or ()) for dictionary in (model.encoder.dictionary, task.dictionary))
    for what, (own, known) in {"types of tokens": types, "classes": (heads[0], len(task.classes))}.items():
        if own != known:
            raise UserError(f"has {own} {what} and its task {known}; give the folder of its training as DATA")


# ----------------------------------------------------------------------------------------------- inputs


def read_examples(classifier: Classifier, split: str) -> ExampleDataset:
    """A split with its labels, if it has any."""
    task, folder = classifier.task, classifier.task.folder
    needs_pairs = classifier.models[0].pairs
    if folder.pairs() != needs_pairs:
        known, has = ("pairs", "one input") if needs_pairs else ("single inputs", "two inputs")
        remedy = "give other data" if needs_pairs else "train with --task mega_classification and --pairs"
        raise UserError(f"the model classifies {known}, and {task.cfg.data} has {has} for each label; {remedy}")
    numbers = None
    if folder.labels_file(split).exists():
        numbers = class_numbers(folder.labels(split), task.classes, str(folder.labels_file(split)))
    examples = task.examples(folder.inputs(split), numbers)
    for inputs in examples.inputs:
        if inputs.cut:
            print(f"{inputs.about_cut()} and are cut, as in the training", file=sys.stderr)
    _tell_of_other_lengths(task.length, task.count_other_lengths(examples))
    return examples


def _tell_of_other_lengths(length: Optional[int], count: int) -> None:
    if count:
        print(f"more or fewer numbers than the {length:,} of training examples: {count:,} inputs", file=sys.stderr)


def shown(prediction: Prediction) -> str:
    return f"{prediction.label}\t{prediction.probability:.4f}"


def classified_lines(classifier: Classifier, lines: Iterator[bytes], batch_size: int) -> Iterator[str]:
    """A result for each line, several lines at a time; those before a line with an error have results too."""
    numbered, cut, other = enumerate(lines, 1), 0, 0
    for batch in iter(lambda: list(islice(numbered, batch_size)), []):
        inputs, refused = [], None
        for number, line in batch:
            try:
                parsed = _parsed(classifier, re.sub(rb"\r?\n?\Z", b"", line))  # as in files
                examples = classifier.examples([parsed])
                cut += any(one.cut for one in examples.inputs)
                differs = classifier.task.count_other_lengths(examples)
                if differs and not other:  # before its result
                    usual = f"{classifier.task.length:,} numbers as in the training"
                    print(f"line {number} does not have {usual}, so its class is a guess", file=sys.stderr)
                other += differs
                inputs.append(parsed)
            except ValueError as error:
                if not is_for_user(error):
                    raise
                refused = f"in line {number}: {error}"
                break
        try:
            for row in classifier.probabilities(classifier.examples(inputs), batch_size):
                yield shown(classifier.prediction(row))
        except ValueError as error:
            if not is_for_user(error):
                raise
            raise UserError(f"after line {batch[0][0] - 1}: {error}") from None
        if refused:
            raise UserError(refused)
    _tell_of_other_lengths(classifier.task.length, other)
    if cut:
        longest = classifier.task.longest
        print(f"longer than {longest:,} positions and cut, as in the training: {cut:,} lines", file=sys.stderr)


def _parsed(classifier: Classifier, line: bytes) -> Any:
    """The input of a line, or both inputs of a pair, which a tab separates."""
    parsers = {"bytes": bytes, "tokens": _text, "values": partial(_numbers, classifier.task.number_type)}
    parse = parsers[str(classifier.task.cfg.input_kind)]
    if not classifier.models[0].pairs:
        return parse(line)
    parts = line.split(b"\t")
    if len(parts) != 2:
        raise ValueError(f"the number of tabs is {len(parts) - 1}; give two inputs with one tab between them")
    return tuple(map(parse, parts))


def _text(line: bytes) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError:
        raise ValueError("the text is not UTF-8; convert it, with iconv for instance") from None


def _numbers(number_type: Optional[str], line: bytes) -> np.ndarray:
    """Numbers of the type of the training."""
    if number_type is None:
        raise ValueError(
            "the checkpoint does not say whether it was trained on uint8, int16 or floats; give a folder in place of -"
        )
    try:
        values = np.array(line.split(), np.float64)
    except ValueError:
        raise ValueError("a word is not a number; give numbers, separated by blanks") from None
    if number_type == "float" or not values.size:
        return values
    limits = np.iinfo(number_type)
    if (values != values.round()).any() or values.min() < limits.min or values.max() > limits.max:
        raise ValueError(f"numbers must be integers from {limits.min:,} to {limits.max:,}, as in the training")
    return values.astype(number_type)


# ----------------------------------------------------------------------------------------------- scores


class Scores(NamedTuple):
    """Accuracy, loss, and which classes are taken for which."""

    labels: List[str]
    truth: Tensor  # (N,) class numbers
    probabilities: Tensor  # (N, classes)

    @property
    def predicted(self) -> Tensor:
        return self.probabilities.argmax(1)

    @property
    def accuracy(self) -> float:
        return float(self.predicted.eq(self.truth).double().mean())

    @property
    def confusion(self) -> Tensor:
        """(classes, classes): examples of the class of a row that are predicted as that of a column."""
        classes = len(self.labels)
        return torch.bincount(classes * self.truth + self.predicted, minlength=classes**2).view(classes, classes)

    def numbers(self) -> Dict[str, Any]:
        chosen = self.probabilities.double().gather(1, self.truth[:, None]).clamp_min(1e-30)
        return {
            "examples": len(self.truth),
            "accuracy": self.accuracy,
            "bits": abs(float(chosen.log2().mean())),  # not -0.0
            "classes": self.labels,
            "confusion": self.confusion.tolist(),
        }

    def summary(self) -> str:
        count, accuracy = len(self.truth), self.accuracy
        error = math.sqrt(accuracy * (1 - accuracy) / count)
        largest = int(torch.bincount(self.truth, minlength=len(self.labels)).max()) / count
        return (
            f"accuracy {accuracy:.1%} of {count:,} examples (standard error {error:.1%}; the most frequent class has "
            f"{largest:.1%}), loss {self.numbers()['bits']:.3f} bits"
        )


def figure(scores: Scores) -> Any:
    """Which classes are taken for which."""
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(4.5, 4.5), layout="constrained")
    axis, counts = drawing.subplots(), scores.confusion.numpy()
    shares = counts / counts.sum(1, keepdims=True).clip(1)
    axis.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    places, labels = range(len(scores.labels)), list(map(plain, scores.labels))
    axis.set(xlabel="predicted", ylabel="label", title=f"accuracy {scores.accuracy:.1%} of {len(scores.truth):,}")
    axis.set_xticks(places, labels, rotation=90 if max(map(len, scores.labels)) > 2 else 0, fontsize=7)
    axis.set_yticks(places, labels, fontsize=7)
    if len(scores.labels) <= 12:
        for row in places:
            for column in places:
                color = "white" if shares[row, column] > 0.5 else "black"
                count = int(counts[row, column]) or ""
                axis.text(column, row, count, ha="center", va="center", fontsize=7, color=color)
    return drawing
