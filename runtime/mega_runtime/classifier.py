"""Classifiers of text, bytes or rows of numbers, alone or in pairs."""

import logging
from pathlib import Path
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Union

import numpy as np

from mega_runtime.folder import Folder, check_count, check_finite
from mega_runtime.text import Types, check_text
from mega_runtime.translator import padded

logger = logging.getLogger(__name__)
SCALES = {"uint8": 255.0, "int16": 32768.0, "float": 1.0}  # numbers of a file are divided by it


class Prediction(NamedTuple):
    """The class of one input."""

    label: str  # of the most probable class
    probability: float
    probabilities: Dict[str, float]  # of all classes by label


class Classifier:
    """An exported classifier."""

    kind = "classifier"

    def __init__(self, folder: Union[str, Path], threads: int = 1, exact_products: Optional[bool] = None):
        self.folder = Folder(folder, self.kind, threads, exact_products)
        self.config = self.folder.config
        self.labels: List[str] = self.config["classes"]
        self.inputs: Dict[str, Any] = self.config["inputs"]
        self.types: Optional[Types] = None
        self.warned = False  # of an input that is cut
        if self.inputs["kind"] != "values":
            special = self.config["special"]
            self.types = Types(self.folder.types("source.txt"), special["unk"], special["pad"])
        self.encoder = self.folder.session("encoder.onnx")

    def predict(self, inputs: Iterable[Any], batch_size: int = 16) -> List[Prediction]:
        """Classifies inputs: text, bytes, or arrays of numbers as in the files of the training; pairs are tuples."""
        if isinstance(inputs, (str, bytes)):
            raise TypeError("inputs is a single text; give a list of inputs")
        check_count("batch_size", batch_size)
        rows = [self._encoded(given, f"input {number}") for number, given in enumerate(inputs, 1)]
        order = sorted(range(len(rows)), key=lambda row: max(map(len, rows[row])))
        found: List[Prediction] = [None] * len(rows)  # type: ignore[list-item]
        for start in range(0, len(order), batch_size):
            batch = order[start : start + batch_size]
            for row, probabilities in zip(batch, self._probabilities([rows[row] for row in batch])):
                if self.types is None and not np.isfinite(probabilities).all():
                    raise ValueError(f"the probabilities of input {row + 1} are not numbers; its values are too large")
                check_finite(probabilities)
                best = int(probabilities.argmax())
                by_label = dict(zip(self.labels, probabilities.tolist()))
                found[row] = Prediction(self.labels[best], float(probabilities[best]), by_label)
        return found

    def _probabilities(self, rows: List[List[np.ndarray]]) -> np.ndarray:
        """Inputs of a batch, one or two each -> probabilities (S, classes)."""
        parts = [row[part] for part in range(len(rows[0])) for row in rows]  # all first ones, then all second ones
        inputs, real = padded(parts, 0.0 if self.types is None else self.config["special"]["pad"], parts[0].dtype)
        (scores,) = self.encoder.run(["scores"], {"inputs": inputs, "real": real.astype(np.float32)})
        with np.errstate(invalid="ignore"):
            weights = np.exp(scores - scores.max(1, keepdims=True))
        return weights / weights.sum(1, keepdims=True)

    def _encoded(self, given: Any, name: str) -> List[np.ndarray]:
        """The model's inputs for one example, of two parts if it classifies pairs."""
        parts = [given]
        if self.inputs["pairs"]:
            if not (isinstance(given, (list, tuple)) and len(given) == 2):
                raise ValueError(
                    f"{name} is not a pair, which this model classifies; give a tuple of two inputs, in a shell a line "
                    "with a tab between them"
                )
            parts = list(given)
        encoded = [self._values(part, name) if self.types is None else self._tokens(part, name) for part in parts]
        longest = self.inputs["longest"]
        for row in encoded:
            if len(row) > longest and not self.inputs["cut"]:
                raise ValueError(f"{name} has {len(row):,} positions and the model reads {longest:,}; shorten it")
            if len(row) > longest and not self.warned:
                self.warned = True
                logger.warning(f"an input has {len(row):,} positions; the model reads the first {longest:,}")
        return [row[:longest] for row in encoded]

    def _tokens(self, given: Any, name: str) -> np.ndarray:
        of_bytes = self.inputs["kind"] == "bytes"
        if not isinstance(given, (str, bytes) if of_bytes else str):
            raise TypeError(f"{name} is of type {type(given).__name__}; give str{' or bytes' * of_bytes}")
        if isinstance(given, str):
            check_text(given, name)
        if of_bytes:
            words = [str(number) for number in (given.encode() if isinstance(given, str) else given)]
        else:
            words = given.split()
        if not words:
            raise ValueError(f"{name} is empty; leave it out")
        first = [] if self.inputs["first"] is None else [self.inputs["first"]]
        return np.array([*first, *self.types.encode(words, name), self.config["special"]["eos"]], np.int64)

    def _values(self, given: Any, name: str) -> np.ndarray:
        """A row of numbers of the type of the training, scaled as there."""
        if isinstance(given, np.ma.MaskedArray):
            raise ValueError(f"{name} is a masked array; give a plain one, with a number in each place")
        numbers, expected, length = np.asarray(given), self.inputs["number_type"], self.inputs["length"]
        found = "float" if numbers.dtype.kind == "f" else numbers.dtype.name
        if found != expected and numbers.dtype.kind in "iu" and numbers.size and expected in ("uint8", "int16"):
            limits = np.iinfo(expected)  # such as a list of Python's integers
            if numbers.min() < limits.min or numbers.max() > limits.max:
                raise ValueError(f"{name} has numbers beyond those of the training, {limits.min} to {limits.max}")
            found = expected
        if numbers.ndim != 1 or not numbers.size or found != expected or length not in (None, len(numbers)):
            raise ValueError(
                f"{name} has the shape {numbers.shape} and type {numbers.dtype}; give one row of "
                f"{'' if length is None else f'{length:,} '}numbers of type {expected}, as in the training"
            )
        with np.errstate(over="ignore"):
            numbers = numbers.astype(np.float32)
        if not np.isfinite(numbers).all():
            raise ValueError(f"{name} has numbers that are not finite in float32; correct or remove them")
        scaled = numbers / np.float32(SCALES[expected]) - np.float32(self.inputs["mean"])
        return scaled / np.float32(self.inputs["deviation"])
