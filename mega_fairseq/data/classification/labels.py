"""Labels of examples and the order of the classes."""

import re
from pathlib import Path
from textwrap import shorten
from typing import List, Sequence

import numpy as np
from fairseq.data import Dictionary

from mega_fairseq.data.corpus import Corpus

ORDER = "labels.txt"  # one label in a line, in the order of the classes


def read_labels(path: Path) -> List[str]:
    """The labels in a text file, one in a line."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text; give one label in a line") from None
    labels = lines[:-1] if lines[-1] == "" else lines
    for number, label in enumerate(labels, 1):
        if len(label.split()) != 1 or not label.strip().isprintable():
            raise ValueError(f"{path} has {label!r} in line {number}; give one label, a single word, in each line")
    return [label.strip() for label in labels]


def binarised_labels(path: Path, dictionary: Dictionary) -> List[str]:
    """The labels that fairseq-preprocess wrote to `path`.bin and `path`.idx."""
    corpus = Corpus.load(str(path), dictionary)
    if (corpus.lines != 2).any():
        number = int(np.argmax(corpus.lines != 2)) + 1
        raise ValueError(
            f"{path}.bin has {corpus.lines[number - 1] - 1} labels in line {number}; give one in each line"
        )
    names = dictionary.symbols
    return [names[token] for token in corpus.read(0, len(corpus))[::2].tolist()]


def classes_of(dictionary: Dictionary) -> List[str]:
    """The symbols of a label dictionary, without those that fairseq-preprocess adds to fill it."""
    added = re.compile(r"madeupword\d{4}")
    counted = zip(dictionary.symbols, dictionary.count)
    return [name for name, count in list(counted)[dictionary.nspecial :] if count or not added.fullmatch(name)]


def classes_in(labels: Sequence[str]) -> List[str]:
    """The labels that occur: by value if all are whole numbers, else in alphabetical order."""
    found = set(labels)
    numbers = all(re.fullmatch(r"-?\d{1,18}", label) for label in found)
    return sorted(found, key=(lambda label: (int(label), label)) if numbers else None)


def read_classes(path: Path) -> List[str]:
    """The order of the classes in a file."""
    classes = read_labels(path)
    for name in classes:
        if classes.count(name) > 1:
            raise ValueError(f"{path} has the label {name} twice; give each label once")
    return classes


def class_numbers(labels: Sequence[str], classes: Sequence[str], source: str) -> np.ndarray:
    """Each label's place in `classes`."""
    place = {name: number for number, name in enumerate(classes)}
    for number, label in enumerate(labels, 1):
        if label not in place:
            raise ValueError(
                f"{source} has the label {label!r} in line {number}, which is not one of the {len(classes)} classes of "
                f"the training ({shorten(', '.join(classes), 80)}); correct it, or list all classes in {ORDER} before "
                "training"
            )
    return np.array([place[label] for label in labels], dtype=np.int64)
