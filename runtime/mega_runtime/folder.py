"""Reading what `mega-fairseq export` wrote: config.json, the graphs, their weights and the types."""

import hashlib
import json
from numbers import Integral
from pathlib import Path
from typing import Any, Dict, List, Optional, Union

import numpy as np
import onnxruntime

FORMAT = 1  # the newest format of a folder that this version reads
LARGEST, MOST_THREADS = 2**31 - 1, 1024
PROBE = "probe.onnx"  # one product of numbers in 8 bits, of the largest values


class FolderError(ValueError):
    """A folder that cannot be used: one sentence with what to do."""


def check_count(name: str, value: Any, most: int = LARGEST, least: int = 1) -> None:
    if not isinstance(value, Integral) or not least <= value <= most:
        raise ValueError(f"{name} is {value!r}; give a whole number from {least} to {most:,}")


def check_finite(scores: np.ndarray) -> None:
    if not np.isfinite(scores).all():
        raise FloatingPointError("the model gives probabilities that are not numbers; export it again")


class Folder:
    """An exported model of this kind, or of any.

    `exact_products` forces the form of products in 8 bits; by default a product is tried.
    """

    def __init__(
        self,
        path: Union[str, Path],
        kind: Optional[str] = None,
        threads: int = 1,
        exact_products: Optional[bool] = None,
    ):
        check_count("threads", threads, MOST_THREADS)
        self.path, self.threads = Path(path), threads
        try:
            str(path).encode()
        except UnicodeEncodeError:
            raise FolderError(
                f"the name of {str(path)!r} is not UTF-8, which ONNX Runtime needs; rename the folder, or set a locale "
                "of UTF-8"
            ) from None
        self.config = self._read_config(kind)
        self._check_files()
        self.slower_products = False
        if self.config["number_format"] == "int8":
            self.slower_products = not self._products_are_exact() if exact_products is None else exact_products

    def _read_config(self, kind: Optional[str]) -> Dict[str, Any]:
        path = self.path / "config.json"
        try:
            self.content = content = path.read_bytes()
            config = json.loads(content.decode())
            number, found = int(config["format"]), str(config["kind"])
            checksum = str(config.get("checksum", ""))  # of the file without it; earlier versions wrote none
        except OSError as error:
            raise FolderError(
                f"{path} cannot be read ({error.strerror}); give a folder that mega-fairseq export wrote, with "
                "permission to read it"
            ) from None
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            raise FolderError(f"{path} is damaged; copy the folder again") from None
        if number > FORMAT:
            raise FolderError(
                f"{self.path} has format {number} and this mega_runtime reads {FORMAT}; install a newer mega_runtime"
            )
        if checksum and hashlib.sha256(content.replace(checksum.encode(), b"")).hexdigest() != checksum:
            raise FolderError(f"{path} is incomplete or was changed; copy the folder again")
        if found != (kind or found):
            raise FolderError(f"{self.path} contains a {found}; give the folder of a {kind}")
        return config

    def _check_files(self) -> None:
        for name, expected in self.config["files"].items():
            path, digest = self.path / name, hashlib.sha256()
            if Path(name).name != name:
                raise FolderError(f"{path} is not in the folder; copy the folder again")
            try:
                with open(path, "rb") as file:
                    for block in iter(lambda: file.read(1 << 20), b""):
                        digest.update(block)
            except OSError as error:
                self._check_same()
                raise FolderError(
                    f"{path} cannot be read ({error.strerror}); copy the folder again, with permission to read it"
                ) from None
            if digest.hexdigest() != expected:
                self._check_same()
                raise FolderError(f"{path} is incomplete or was changed; copy the folder again")

    def _check_same(self) -> None:
        """Raises an error if another export takes the folder's place: config.json leaves first and comes last."""
        try:
            same = (self.path / "config.json").read_bytes() == self.content
        except FileNotFoundError:
            same = False
        if not same:
            raise FolderError(f"{self.path} was replaced while it was read; start again")

    def types(self, name: str) -> List[str]:
        """The types of a dictionary, by number."""
        if name not in self.config["files"]:  # which are checked, and in the folder
            raise FolderError(f"{self.path / 'config.json'} is damaged; copy the folder again")
        return (self.path / name).read_text(encoding="utf-8").split("\n")[:-1]

    def session(self, name: str, slower_products: Optional[bool] = None) -> onnxruntime.InferenceSession:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = self.threads, 1
        options.log_severity_level = 4  # its errors are raised, too
        if self.slower_products if slower_products is None else slower_products:
            options.add_session_config_entry("session.x64quantprecision", "1")
        path = str(self.path / name)
        try:
            session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # ONNX Runtime has no public class
            self._check_same()
            raise FolderError(
                f"ONNX Runtime cannot load {path} ({error}); copy the folder, with files in place of links"
            ) from None
        self._check_same()  # also if the file fits the others
        return session

    def _products_are_exact(self) -> bool:
        """CPUs with AVX2 but without VNNI add pairs of products in 16 bits, where large ones saturate."""
        session = self.session(PROBE, slower_products=False)
        row = np.ones((1, session.get_inputs()[0].shape[1]), np.float32)  # rounded to 127, times weights of 127
        (y,) = session.run(None, {"x": row})
        return bool(np.allclose(y, row.shape[1], rtol=1e-3))
