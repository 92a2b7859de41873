"""Where a folder has the inputs and labels of a classification data set: layouts of fairseq, the release and ours."""

from pathlib import Path
from typing import List, Optional, Tuple, Type

import numpy as np
from fairseq.data import Dictionary

from mega_fairseq.data.classification import inputs, labels
from mega_fairseq.data.classification.inputs import Inputs, Scaling

KINDS = ("tokens", "bytes", "values")


class Layout:
    """A folder in one layout. Inputs are one sequence, or two for pairs."""

    kind: str
    FILES: str  # what the user should have

    def __init__(self, folder: Path, scaling: Scaling):
        self.folder, self.scaling = folder, scaling

    @classmethod
    def fits(cls, folder: Path) -> bool:
        raise NotImplementedError

    def dictionary(self) -> Optional[Dictionary]:
        return None

    def inputs(self, split: str) -> List[Inputs]:
        raise NotImplementedError

    def labels(self, split: str) -> List[str]:
        return labels.read_labels(self.labels_file(split))

    def labels_file(self, split: str) -> Path:
        return self.folder / f"{split}.label"

    def classes(self) -> List[str]:
        """The order of the classes; empty if there is no training split."""
        order = self.folder / labels.ORDER
        if order.exists():
            return labels.read_classes(order)
        return labels.classes_in(self.labels("train")) if self.labels_file("train").exists() else []

    def unnamed_classes(self) -> List[str]:
        """The order of the classes of a checkpoint that does not name them."""
        return self.classes()

    def pairs(self) -> bool:
        return False

    def number_type(self) -> Optional[str]:
        """The type of the values of the training split, as in Scaling, if it is known without reading them."""
        return None


class Binarised(Layout):
    """What fairseq-preprocess writes, for the task `sentence_prediction`."""

    kind = "tokens"
    FIRST, SECOND, LABELS = "input0", "input1", "label"
    FILES = "the folders input0 and label that fairseq-preprocess wrote"

    @classmethod
    def fits(cls, folder: Path) -> bool:
        return (folder / cls.FIRST / "dict.txt").exists()

    def dictionary(self) -> Dictionary:
        dictionary = Dictionary.load(str(self._dictionary_file(self.FIRST)))
        dictionary.add_symbol("<mask>")  # as fairseq's task has it
        return dictionary

    def inputs(self, split: str) -> List[Inputs]:
        folders = (self.FIRST, self.SECOND)[: 1 + self.pairs()]
        paths = [path for path in map(self._dictionary_file, folders) if path.exists()]
        first, *second = (Dictionary.load(str(path)).symbols for path in paths)
        if second not in ([], [first]):
            raise ValueError(
                f"{' and '.join(map(str, paths))} differ; give fairseq-preprocess the dictionary of the first inputs "
                "with --srcdict for the second"
            )
        dictionary = self.dictionary()
        return [inputs.Tokens(self.folder / name / split, dictionary) for name in folders]

    def _dictionary_file(self, inputs: str) -> Path:
        return self.folder / inputs / "dict.txt"

    def labels(self, split: str) -> List[str]:
        return labels.binarised_labels(self.folder / self.LABELS / split, self._label_dictionary())

    def labels_file(self, split: str) -> Path:
        return self.folder / self.LABELS / f"{split}.bin"

    def classes(self) -> List[str]:
        order = self.folder / labels.ORDER
        if order.exists():
            return labels.read_classes(order)
        return self.unnamed_classes() if (self.folder / self.LABELS).is_dir() else []

    def unnamed_classes(self) -> List[str]:
        """That of the dictionary: fairseq's task and the release know no other."""
        return labels.classes_of(self._label_dictionary())

    def pairs(self) -> bool:
        return (self.folder / self.SECOND).is_dir()

    def _label_dictionary(self) -> Dictionary:
        path = self.folder / self.LABELS / "dict.txt"
        if not path.exists():
            raise FileNotFoundError(
                f"there is no {path}; run fairseq-preprocess --only-source on the labels, one in a line, "
                f"with --destdir {path.parent}"
            )
        return Dictionary.load(str(path))


class ReleasedText(Binarised):
    FIRST, SECOND, LABELS = "src-bin", "src1-bin", "label-bin"
    FILES = "the folders src-bin and label-bin of the released code"


class Lines(Layout):
    """One input in a line, read as bytes."""

    kind = "bytes"
    FILES = "the files train.input and train.label, with one input or label in a line"

    @classmethod
    def fits(cls, folder: Path) -> bool:
        return any(folder.glob("*.input"))

    def dictionary(self) -> Dictionary:
        return inputs.byte_dictionary()

    def inputs(self, split: str) -> List[Inputs]:
        paths = [_existing(self.folder / f"{split}.input")]
        if self.pairs():
            paths.append(self.folder / f"{split}.input1")
            if not paths[1].exists():
                raise FileNotFoundError(
                    f"there is no {paths[1]}, and other splits have a second input for each label; give it, or remove "
                    "the .input1 of all splits"
                )
        return [inputs.ByteLines(path, self.dictionary()) for path in paths]

    def pairs(self) -> bool:
        return any(self.folder.glob("*.input1"))


class Values(Layout):
    """A file of numbers for each split."""

    kind = "values"

    def inputs(self, split: str) -> List[Inputs]:
        path = _existing(self.inputs_file(split))
        return [inputs.Numbers(path, self.read(path), self.scaling)]

    def inputs_file(self, split: str) -> Path:
        raise NotImplementedError

    def read(self, path: Path) -> np.ndarray:
        """The numbers (examples, length)."""
        raise NotImplementedError


class Arrays(Values):
    FILES = "train.npy, an array (examples, length), and train.label with one label in a line"

    @classmethod
    def fits(cls, folder: Path) -> bool:
        return any(folder.glob("*.npy"))

    def number_type(self) -> Optional[str]:
        path = self.inputs_file("train")
        return self.scaling.number_type(inputs.array(path)) if path.exists() else None

    def inputs_file(self, split: str) -> Path:
        return self.folder / f"{split}.npy"

    def read(self, path: Path) -> np.ndarray:
        return inputs.array(path)


class ReleasedImages(Values):
    FILES = "the folders input and label of the released code"

    @classmethod
    def fits(cls, folder: Path) -> bool:
        return any(folder.glob("input/*.src"))

    def number_type(self) -> Optional[str]:
        return "uint8"

    def inputs_file(self, split: str) -> Path:
        return self.folder / "input" / f"{split}.src"

    def read(self, path: Path) -> np.ndarray:
        return inputs.released_images(path)

    def labels_file(self, split: str) -> Path:
        return self.folder / "label" / f"{split}.label"


class ReleasedSpeech(Values):
    FOLDER, NAMES = "processed_data/raw", {"valid": "val"}
    FILES = f"the folder {FOLDER} of the released code"

    @classmethod
    def fits(cls, folder: Path) -> bool:
        return any((folder / cls.FOLDER).glob("*_X.pt"))

    def inputs_file(self, split: str) -> Path:
        return self._file(split, "X")

    def read(self, path: Path) -> np.ndarray:
        return inputs.released_speech(path)

    def labels(self, split: str) -> List[str]:
        return inputs.released_labels(_existing(self.labels_file(split)))

    def labels_file(self, split: str) -> Path:
        return self._file(split, "y")

    def _file(self, split: str, what: str) -> Path:
        return self.folder / self.FOLDER / f"{self.NAMES.get(split, split)}_{what}.pt"


class NoData(Layout):
    """Raises an error where inputs or labels are needed, for a trained model that classifies other inputs."""

    def __init__(self, error: Exception):
        self.error = error

    def inputs(self, split: str) -> List[Inputs]:
        raise self.error

    def labels(self, split: str) -> List[str]:
        raise self.error

    def classes(self) -> List[str]:
        return []


LAYOUTS: Tuple[Type[Layout], ...] = (Binarised, ReleasedText, Lines, Arrays, ReleasedImages, ReleasedSpeech)


def open_folder(path: str, kind: str, scaling: Scaling) -> Layout:
    """The data set in a folder, with inputs of this kind."""
    folder = Path(path)
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {path}; give one with {_files(kind)}")
    found = [layout for layout in LAYOUTS if layout.fits(folder)]
    for layout in found:
        if layout.kind == kind:
            return layout(folder, scaling)
    if found:
        raise ValueError(
            f"{path} contains {found[0].kind} ({found[0].FILES}) and --input-kind is {kind}; "
            f"give --input-kind {found[0].kind}"
        )
    raise FileNotFoundError(f"{path} contains no inputs; give a folder with {_files(kind)}")


def _files(kind: str) -> str:
    return ", or ".join(layout.FILES for layout in LAYOUTS if layout.kind == kind)


def _existing(path: Path) -> Path:
    if not path.exists():
        raise FileNotFoundError(f"there is no {path}; give the name of a split that exists")
    return path
