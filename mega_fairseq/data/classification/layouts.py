"""Where a folder has the inputs and labels of a classification data set: layouts of fairseq, the release and ours."""

from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional

import numpy as np
from fairseq.data import Dictionary

from mega_fairseq.data.classification import inputs, labels
from mega_fairseq.data.classification.inputs import Inputs, Scaling
from mega_fairseq.data.corpus import load_dictionary


class Layout(NamedTuple):
    """Names of files with `{}` for the split, relative to the folder; `second` has the other inputs of pairs."""

    kind: str
    inputs: str
    labels: str
    second: Optional[str] = None
    valid: str = "valid"  # the name of that split in files

    def __str__(self) -> str:
        return f"{self.inputs.format('train')} and {self.labels.format('train')}"


LAYOUTS = (
    Layout("tokens", "input0/{}.bin", "label/{}.bin", "input1/{}.bin"),  # of fairseq-preprocess
    Layout("tokens", "src-bin/{}.bin", "label-bin/{}.bin", "src1-bin/{}.bin"),  # released
    Layout("bytes", "{}.input", "{}.label", "{}.input1"),
    Layout("values", "{}.npy", "{}.label"),
    Layout("values", "input/{}.src", "label/{}.label"),  # released images
    Layout("values", "processed_data/raw/{}_X.pt", "processed_data/raw/{}_y.pt", valid="val"),  # released speech
)
KINDS = ("tokens", "bytes", "values")
NUMBERS: Dict[str, Callable[[Path], np.ndarray]] = {  # a file of values -> (examples, length)
    ".npy": inputs.array,
    ".src": inputs.released_images,
    ".pt": inputs.released_speech,
}


class DataFolder:
    """A data set in a folder. Its inputs are one sequence, or two for pairs."""

    def __init__(self, folder: Path, layout: Layout, scaling: Scaling):
        self.folder, self.layout, self.scaling = folder, layout, scaling
        self.binarised = layout.kind == "tokens"

    def exists(self) -> bool:
        if self.binarised:  # a trained model needs no more than the dictionary
            return self._dictionary_file(self.layout.inputs).exists()
        return any(self.folder.glob(self.layout.inputs.format("*")))

    # ------------------------------------------------------------------------------------------ inputs

    def dictionary(self) -> Optional[Dictionary]:
        if self.layout.kind == "bytes":
            return inputs.byte_dictionary()
        if not self.binarised:
            return None
        dictionary = load_dictionary(str(self._dictionary_file(self.layout.inputs)))
        dictionary.add_symbol("<mask>")  # as fairseq's task has it
        return dictionary

    def inputs(self, split: str) -> List[Inputs]:
        patterns = [self.layout.inputs, *[self.layout.second] * self.pairs()]
        paths = [self._file(pattern, split) for pattern in patterns]
        if not self.binarised:
            return [self._read(path) for path in paths]
        dictionaries = [path.with_name("dict.txt") for path in paths]
        first, *second = (load_dictionary(str(path)).symbols for path in dictionaries if path.exists())
        if second not in ([], [first]):
            raise ValueError(
                f"{' and '.join(map(str, dictionaries))} differ; give fairseq-preprocess the dictionary of the first "
                "inputs with --srcdict for the second"
            )
        dictionary = self.dictionary()
        return [inputs.Tokens(path.with_suffix(""), dictionary) for path in paths]

    def _read(self, path: Path) -> Inputs:
        if self.layout.kind == "bytes":
            return inputs.ByteLines(path, inputs.byte_dictionary())
        return inputs.Numbers(path, NUMBERS[path.suffix](path), self.scaling)

    def pairs(self) -> bool:
        return self.layout.second is not None and any(self.folder.glob(self.layout.second.format("*")))

    def number_type(self) -> Optional[str]:
        """The type of the values of the training split, as in Scaling, if it is known without reading them."""
        path = self._path(self.layout.inputs, "train")
        if path.suffix == ".src":
            return "uint8"
        return Scaling.number_type(inputs.array(path)) if path.suffix == ".npy" and path.exists() else None

    # ------------------------------------------------------------------------------------------ labels

    def labels(self, split: str) -> List[str]:
        path = self._file(self.layout.labels, split)
        if self.binarised:
            return labels.binarised_labels(path.with_suffix(""), self._label_dictionary())
        return inputs.released_labels(path) if path.suffix == ".pt" else labels.read_labels(path)

    def labels_file(self, split: str) -> Path:
        return self._path(self.layout.labels, split)

    def classes(self) -> List[str]:
        """The order of the classes; empty if there is no training split."""
        order = self.folder / labels.ORDER
        if order.exists():
            return labels.read_classes(order)
        if self.binarised:
            return self.unnamed_classes() if self.labels_file("train").parent.is_dir() else []
        return labels.classes_in(self.labels("train")) if self.labels_file("train").exists() else []

    def unnamed_classes(self) -> List[str]:
        """The order of the classes of a checkpoint that does not name them.

        For tokens it is that of the dictionary: fairseq's task and the release know no other.
        """
        return labels.classes_of(self._label_dictionary()) if self.binarised else self.classes()

    def _label_dictionary(self) -> Dictionary:
        path = self._dictionary_file(self.layout.labels)
        if not path.exists():
            raise FileNotFoundError(
                f"there is no {path}; run fairseq-preprocess --only-source on the labels, one in a line, "
                f"with --destdir {path.parent}"
            )
        return load_dictionary(str(path))

    # ------------------------------------------------------------------------------------------- files

    def _path(self, pattern: str, split: str) -> Path:
        return self.folder / pattern.format(self.layout.valid if split == "valid" else split)

    def _file(self, pattern: str, split: str) -> Path:
        path = self._path(pattern, split)
        if not path.exists():
            raise FileNotFoundError(f"there is no {path}; give a split that has all its inputs and labels")
        return path

    def _dictionary_file(self, pattern: str) -> Path:
        return (self.folder / pattern).with_name("dict.txt")


class NoData(DataFolder):
    """Raises an error where inputs or labels are needed, for a trained model that classifies other inputs."""

    def __init__(self, error: Exception):
        self.error = error

    def inputs(self, split: str) -> Any:
        raise self.error

    def dictionary(self) -> None:
        return None

    def classes(self) -> List[str]:
        return []

    def pairs(self) -> bool:
        return False

    labels, number_type, unnamed_classes = inputs, dictionary, classes


def open_folder(path: str, kind: str, scaling: Scaling) -> DataFolder:
    """The data set in a folder, with inputs of this kind."""
    needed = ", or ".join(str(layout) for layout in LAYOUTS if layout.kind == kind)
    if not Path(path).is_dir():
        raise FileNotFoundError(f"there is no folder {path}; give one with {needed}")
    data = [each for each in (DataFolder(Path(path), layout, scaling) for layout in LAYOUTS) if each.exists()]
    for each in data:
        if each.layout.kind == kind:
            return each
    if data:
        other = data[0].layout.kind
        raise ValueError(f"{path} contains {other} and --input-kind is {kind}; give --input-kind {other}")
    raise FileNotFoundError(f"{path} contains no inputs; give a folder with {needed}")
