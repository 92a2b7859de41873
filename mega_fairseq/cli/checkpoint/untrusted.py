"""Load files of torch.save without executing code in them: a checkpoint may come from anybody."""

import argparse
import contextlib
import pickle
import re
import reprlib
import zipfile
from typing import Any, BinaryIO, Dict, Iterator, List

import torch
from torch import Tensor

from mega_fairseq.cli import UserError
from mega_fairseq.models.checkpoints import of_numpy

# Types of a model's numbers: not complex, and none that torch only stores, such as float8.
NUMBERS = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.bool,
)


def load(path: str, writer: str) -> Any:
    """Return the tensors and plain containers in the file at `path`; raise UserError for anything else."""
    damaged = UserError("is not a checkpoint, or only a part of one; copy or download it again")
    try:
        file = open(path, "rb")  # noqa: SIM115 - the next statement closes it
    except OSError as error:
        raise UserError(f"cannot be read ({error.strerror}); give the path of a checkpoint") from None
    with file:
        if _is_torchscript(file):
            raise UserError(f"is a TorchScript program and was not executed; give a checkpoint that {writer} wrote")
        try:
            _check_records(file)
            # Besides torch's: arrays, and a Namespace of options without a dataclass, which fairseq-train saves.
            with _allow_only([argparse.Namespace, *of_numpy(_Ignored, _Ignored, _Ignored)]):
                return torch.load(file, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            requested = re.search(r"(?:GLOBAL|function|class) ([\w.]+\.[\w.]+)", str(error))
            if requested is None:
                raise damaged from None
            raise UserError(
                f"asks for {requested.group(1)}, which no checkpoint of {writer} needs, and was not executed; "
                f"give a file that {writer} wrote"
            ) from None
        except Exception:
            raise damaged from None


def _check_records(file: BinaryIO) -> None:
    """Raise an error if a record of the archive does not have its checksum, which torch does not compare."""
    if zipfile.is_zipfile(file):  # torch before 1.6 wrote other files, without checksums
        with zipfile.ZipFile(file) as archive:
            record = archive.testzip()
        if record is not None:
            raise zipfile.BadZipFile(record)
    file.seek(0)


def _is_torchscript(file: BinaryIO) -> bool:
    """torch before 2.6 executes TorchScript even with weights_only=True (CVE-2025-32434)."""
    try:
        return "constants.pkl" in torch._C.PyTorchFileReader(file).get_all_records()
    except (OSError, RuntimeError):  # not a zip archive
        return False
    finally:
        file.seek(0)


def model_tensors(content: Any, writer: str) -> Dict[str, Tensor]:
    """Return the state dict of the model in a checkpoint; each of its tensors must be complete."""
    if not isinstance(content, dict) or not isinstance(content.get("model"), dict):
        raise UserError(f"contains no model, so it is not a fairseq checkpoint; give one that {writer} wrote")
    tensors = content["model"]
    for name, tensor in tensors.items():
        usable = isinstance(tensor, Tensor) and tensor.numel() and _is_stored(tensor) and tensor.dtype in NUMBERS
        if not (isinstance(name, str) and usable):
            raise UserError(f"contains {reprlib.repr(name)}, which is not a model's tensor; get the file again")
    return dict(tensors)


def _is_stored(tensor: Tensor) -> bool:
    """Whether each entry is stored: the tensor is not sparse, on the meta device, or an expanded view."""
    if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
        return False
    return tensor.numel() * tensor.element_size() <= tensor.untyped_storage().nbytes()


def check_finite(tensors: Dict[str, Tensor]) -> None:
    """Refuses NaN and infinity, except where fairseq saves uninitialised memory."""
    read = {name: tensor for name, tensor in tensors.items() if not name.endswith("._float_tensor")}
    wrong = [name for name, tensor in read.items() if not torch.isfinite(tensor).all()]
    if wrong:
        raise UserError(
            f"contains NaN or infinity in {len(wrong)} of its tensors, the first is {wrong[0]!r}: the model has "
            "diverged; give an earlier checkpoint"
        )


@contextlib.contextmanager
def _allow_only(allowed: List[Any]) -> Iterator[None]:
    """Let torch.load create only these types, whatever else the process has added to torch's allow-list."""
    before = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals(allowed)
    try:
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)


class _Ignored:
    """Replaces numpy arrays, of any type: BLEU counts in the training log, which no command reads."""

    def __init__(self, *arguments: Any):
        pass

    def __setstate__(self, state: Any) -> None:
        pass
